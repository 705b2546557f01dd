"""Converts records, their objects, and what the HPARAMS tab shows, to TensorBoard's summaries."""

from __future__ import annotations

import json
import logging
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.histogram_pb2 import HistogramProto
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2 as api
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
from tensorboard.plugins.text.summary_v2 import text_pb

from hydraloop.run.record_log import ObjectKind, Record
from hydraloop.tracking.description import override_values
from hydraloop.tracking.tracker import Finish, Run, valid_utf8

log = logging.getLogger(__name__)

_PNG = b"\x89PNG\r\n\x1a\n"
_SIZE = struct.Struct(">II")
"""Width and height of a PNG, which follow its signature and the length and name of the first chunk."""
_WELL_KNOWN = (
    *("seed", "task.model._target_", "optimizer._target_", "optimizer.lr", "optimizer.weight_decay"),
    *("data.loader.batch_size", "precision.name"),
)
"""Shown for every run, so that runs of different command lines can be compared: these options affect the result."""
_NO_HYPERPARAMETERS = ("resume", "load_from", "resume_strict")
"""They say where a run starts."""
_TYPES = {bool: api.DATA_TYPE_BOOL, str: api.DATA_TYPE_STRING}
"""Types of hyperparameters other than numbers."""


class Summaries:
    """Converts records to summaries.

    Args:
        run_dir: the directory that file names in records refer to.
        pictures: whether to include pictures.
    """

    def __init__(self, run_dir: Path, *, pictures: bool) -> None:
        self._run_dir = run_dir
        self._left_out = set() if pictures else {"image"}
        self._warned: set[str] = set()

    def of(self, record: Record) -> Summary:
        """Return the summary of a record. The first object of a kind that cannot be shown is a warning."""
        summary = Summary()
        for tag, value in record.metrics.items():
            name = f"train_{tag}" if tag.startswith("perf/") else tag  # only the first two groups are open: test, train
            summary.value.add(tag=valid_utf8(name), simple_value=value)
        for one in record.objects:
            if one.kind in self._left_out:
                continue
            try:
                if one.kind not in _SHOWN:
                    raise ValueError("TensorBoard does not show files")
                summary.value.extend(_SHOWN[one.kind]((self._run_dir / one.path).read_bytes(), valid_utf8(one.name)))
            except Exception as error:  # a damaged file can raise any error
                level = logging.INFO if one.kind in self._warned else logging.WARNING
                log.log(level, "%s is skipped, as others like it will be: %s", one.path, error)
                self._warned.add(one.kind)
        return summary


def text(tag: str, content: str) -> Summary.Value:
    """Return Markdown for the TEXT tab."""
    return text_pb(tag, content.encode(errors="replace")).value[0]


def _image(content: bytes, tag: str) -> Iterator[Summary.Value]:
    if not content.startswith(_PNG) or len(content) < 24:
        raise ValueError("it is not a PNG file")
    width, height = _SIZE.unpack_from(content, 16)
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
    yield Summary.Value(tag=tag, image=image)


def _text(content: bytes, tag: str) -> Iterator[Summary.Value]:
    yield text(tag, content.decode(errors="replace"))


def _table(content: bytes, tag: str) -> Iterator[Summary.Value]:
    table = json.loads(content)
    names, rows = table["columns"], table["rows"]
    yield text(tag, "\n".join(_line(cells) for cells in (names, ["---"] * len(names), *rows)))


def _line(cells: Iterable[Any]) -> str:
    shown = ("" if cell is None else " ".join(str(cell).split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(shown)} |"


def _histograms(content: bytes, tag: str) -> Iterator[Summary.Value]:
    for name, counted in json.loads(content).items():
        nonfinite = counted.pop("nonfinite")
        if counted["bucket"]:
            yield Summary.Value(tag=valid_utf8(name), histo=HistogramProto(**counted))
        if nonfinite:
            yield Summary.Value(tag=valid_utf8(f"nonfinite/{name}"), simple_value=nonfinite)


_SHOWN: dict[ObjectKind, Any] = {"image": _image, "text": _text, "table": _table, "histogram": _histograms}


def hyperparameters(run: Run, wanted: Sequence[str] | None) -> dict[str, str | int | float | bool]:
    """Return the options that are a run's hyperparameters.

    Args:
        run: the run.
        wanted: keys, or the first parts of keys. None: the typed keys, the sweep's axes and `_WELL_KNOWN`. The whole
            config would be about 150 columns, nearly all of them equal in every run.
    """
    typed = {key: value or "removed" for key, value in override_values(run.run_dir).items()}
    # The choice of a group (`model=gpt`, `hooks=[ema]`) is not in the config: its typed value is shown.
    params = {**typed, **run.attempt.params}
    if wanted is None:
        keys = dict.fromkeys([*(() if run.sweep is None else run.sweep.axes), *typed, *_WELL_KNOWN])
    else:
        keys = {key: None for key in params if any(f"{key}.".startswith(f"{start}.") for start in wanted)}
    shown = {key: params[key] for key in keys if key in params and key not in _NO_HYPERPARAMETERS}
    texts = {key: "null" if value is None else value for key, value in shown.items()}
    return {valid_utf8(key): valid_utf8(value) if isinstance(value, str) else value for key, value in texts.items()}


def experiment(run: Run, params: Mapping[str, Any], metrics: Iterable[str]) -> Summary.Value:
    """Return the summary value with the columns of the table: the hyperparameters, then `metrics`.

    Without it, TensorBoard would treat every scalar as a metric and show the first five. Swept keys come first.
    """
    axes = () if run.sweep is None else run.sweep.axes
    types = {name: _TYPES.get(type(value), api.DATA_TYPE_FLOAT64) for name, value in params.items()}
    options = [api.HParamInfo(name=name, type=found, differs=name in axes) for name, found in types.items()]
    tags = [api.MetricInfo(name=api.MetricName(tag=valid_utf8(tag))) for tag in metrics]
    shown = api.Experiment(time_created_secs=run.attempts[0].began, hparam_infos=options, metric_infos=tags)
    return _value(metadata.EXPERIMENT_TAG, HParamsPluginData(experiment=shown))


def session_end(finish: Finish, ended: float) -> Summary.Value:
    """Return the summary value that says how a run ended."""
    status = api.STATUS_SUCCESS if finish.exit_code == 0 else api.STATUS_FAILURE
    info = SessionEndInfo(status=status, end_time_secs=ended)
    return _value(metadata.SESSION_END_INFO_TAG, HParamsPluginData(session_end_info=info))


def _value(tag: str, content: HParamsPluginData) -> Summary.Value:
    """Do what `tensorboard.plugins.hparams.summary` does, which needs TensorFlow."""
    return Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR)
