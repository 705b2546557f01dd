"""TensorBoardTracker: writes event files. Needs tensorboard, but neither torch nor TensorFlow."""

from __future__ import annotations

import json
import logging
import re
import shlex
import struct
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.histogram_pb2 import HistogramProto
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2 as api
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from hydraloop.run_files.atomic import file_name
from hydraloop.run_files.record_log import ObjectKind, Record
from hydraloop.tracking.own_files import check_folder, own
from hydraloop.tracking.run_description import override_values
from hydraloop.tracking.tracker import Finish, LostError, Run, Tracker, UnusableError, valid_utf8

log = logging.getLogger(__name__)

FOLDER = "tensorboard"
"""Folder of the event files, in the run directory."""
_NAME = "events.out.tfevents.{}.hydraloop"
_ODD = r"[^\w.,=+()\[\]-]"
_PNG = b"\x89PNG\r\n\x1a\n"
_SIZE = struct.Struct(">II")
"""Width and height of a PNG, which follow its signature and the length and name of the first chunk."""
_WELL_KNOWN = (
    *("seed", "task.model._target_", "optimizer._target_", "optimizer.lr", "optimizer.weight_decay"),
    *("data.loader.batch_size", "precision.name"),
)
"""Shown for every run, so that runs of different command lines can be compared: these options affect the result."""
_OF_SEVERAL = re.compile(r"optimizer\.\w+\.(_target_|lr|weight_decay)")
"""The same, with several optimizers."""
_NO_HYPERPARAMETERS = ("resume", "load_from", "resume_strict")
"""They say where a run starts."""
_TYPES = {bool: api.DATA_TYPE_BOOL, str: api.DATA_TYPE_STRING}
"""Types of hyperparameters other than numbers."""


class TensorBoardTracker(Tracker):
    """Writes `<run_dir>/tensorboard/events.out.tfevents.…`, one file for each attempt.

    A job of a sweep writes to `tensorboard/<name of the job>/`, because TensorBoard names a run after its folder.

    Each record is written once: `memory` has the number of confirmed bytes, and is saved with the cursor. Bytes that a
    killed process wrote after these are overwritten with the same events. If a resume has cut records that were sent,
    all of them go into a new file, and the older files are emptied. `SessionLog.START` (PyTorch's `purge_step`) alone
    does not suffice: TensorBoard's fast loader ignores it, and drops old points only of tags that it finds again at an
    earlier step.

    `memory`: `file`, the name of the attempt's file; `size`, its confirmed bytes; `attempts`, how many configs are
    written; `columns`, whether the columns of the HPARAMS table are written.
    """

    def __init__(self, options: dict[str, Any], run: Run, memory: dict[str, Any]) -> None:
        super().__init__(options, run, memory)
        self._folder = run.run_dir / FOLDER
        if run.sweep is not None:
            self._folder /= file_name(run.name.lstrip("."), _ODD) or "job"
        self._params = _hyperparameters(run, options.get("hparams"))
        self._warned: set[str] = set()
        """Kinds of objects of which one could not be shown."""

    def rewound(self, index: int) -> int:
        """Write everything again."""
        self.memory.clear()
        return 0

    def open(self) -> None:
        """Begin this attempt's file if it does not exist.

        Raises:
            UnusableError: a file exists at the path of the folder.
        """
        attempt, before, began = self.run.attempt, self.memory.get("file"), self.run.attempts[0].began
        name = _NAME.format(f"{began + attempt.number:010.0f}")  # sorts in the order of attempts
        if before == name:
            return
        try:
            check_folder(self.run.run_dir / FOLDER)
            check_folder(self._folder)
            self._folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UnusableError(f"{self._folder} is not a folder: move it away") from error
        head = [Event(wall_time=attempt.began, file_version="brain.Event:2")]
        if before is None:
            for path in self._folder.glob(_NAME.format("*")):
                # A TensorBoard that is open would read no file after one that is deleted.
                own(self.run.run_dir, path).write_bytes(b"")
            # It also drops the points that it has read.
            head.append(Event(wall_time=attempt.began, session_log=SessionLog(status=SessionLog.START)))
            session = hparams_pb(self._params, trial_id="", start_time_secs=began)  # else equal runs would be one row
            head.append(_event(attempt.began, 0, session.value[0]))
        else:
            self._write(before, self.memory["size"], ())  # removes the end of the session
        new = self.run.attempts[self.memory.get("attempts", 0) :]
        head += [_event(one.began, one.iteration, _markdown("config", f"```yaml\n{one.config}\n```")) for one in new]
        (self._folder / name).touch()
        self.memory.update(size=self._write(name, 0, head), file=name, attempts=len(self.run.attempts))

    def send(self, records: Sequence[Record]) -> None:
        """Append an event for each record, and flush once.

        The first evaluation's event also has the columns of the HPARAMS table, because the metrics are known then.
        """
        self.open()
        columns, events = self.memory.get("columns", False), []
        for record in records:
            summary = self._summary(record)
            if not columns and record.mode != "train" and "loss" in record.values:
                columns = True
                tags = [f"{mode}/{name}" for mode in ("val", "test") for name in record.values]
                summary.value.append(self._columns([*tags, "train/loss"]))
            events.append(Event(wall_time=record.timestamp, step=record.iteration, summary=summary))
        self.memory.update(size=self._write(self.memory["file"], self.memory["size"], events), columns=columns)

    def finish(self, finish: Finish) -> None:
        """End the session of the HPARAMS tab.

        This event is not confirmed in `memory`, so that records of a resumed run replace it: TensorBoard would
        otherwise use the first end that it finds.
        """
        self.open()
        ended = time.time()
        status = api.STATUS_SUCCESS if finish.exit_code == 0 else api.STATUS_FAILURE
        info = HParamsPluginData(session_end_info=SessionEndInfo(status=status, end_time_secs=ended))
        end = _event(ended, 0, _hparams(metadata.SESSION_END_INFO_TAG, info))
        self._write(self.memory["file"], self.memory["size"], [end])

    @property
    def where(self) -> str:
        """The command that shows the run, or all jobs of its sweep."""
        folder = self.run.run_dir / FOLDER if self.run.sweep is None else self.run.sweep.folder
        shown = folder.relative_to(Path.cwd()) if folder.is_relative_to(Path.cwd()) else folder
        return f"tensorboard --logdir {shlex.quote(str(shown))}"

    def _write(self, name: str, size: int, events: Sequence[Event]) -> int:
        """Write events after the first `size` bytes of a file, and flush. Returns the new size.

        Raises:
            LostError: the file was deleted or shortened. All records are sent again.
        """
        path = self._folder / name
        if path.is_symlink() or (path.exists() and path.stat().st_nlink > 1):
            raise UnusableError(f"{path} is a link: remove it")
        if not path.exists() or path.stat().st_size < size:
            self.memory.clear()
            raise LostError(0)
        with path.open("rb+") as file:
            file.truncate(size)
            file.seek(size)
            for event in events:
                RecordWriter(file).write(event.SerializeToString())
            return file.tell()

    def _summary(self, record: Record) -> Summary:
        """Return a record's numbers and objects. The first object of a kind that cannot be shown is a warning."""
        summary = Summary()
        for tag, value in record.metrics.items():
            name = f"train_{tag}" if tag.startswith("perf/") else tag  # only the first two groups are open: test, train
            summary.value.add(tag=valid_utf8(name), simple_value=value)
        for one in record.objects:
            if one.kind == "image" and not self.options.get("pictures", True):
                continue
            try:
                if one.kind not in _SHOWN:
                    raise ValueError("TensorBoard does not show files")
                content = own(self.run.run_dir, self.run.run_dir / one.path).read_bytes()
                summary.value.extend(_SHOWN[one.kind](content, valid_utf8(one.name)))
            except Exception as error:  # a damaged file can raise any error
                level = logging.INFO if one.kind in self._warned else logging.WARNING
                log.log(level, "%s is skipped, as others like it will be: %s", one.path, error)
                self._warned.add(one.kind)
        return summary

    def _columns(self, metrics: Iterable[str]) -> Summary.Value:
        """Return the columns of the HPARAMS table: the hyperparameters, then `metrics`.

        Without it, TensorBoard would treat every scalar as a metric and show the first five. Swept keys come first.
        """
        axes = () if self.run.sweep is None else self.run.sweep.axes
        types = {name: _TYPES.get(type(value), api.DATA_TYPE_FLOAT64) for name, value in self._params.items()}
        options = [api.HParamInfo(name=name, type=found, differs=name in axes) for name, found in types.items()]
        tags = [api.MetricInfo(name=api.MetricName(tag=valid_utf8(tag))) for tag in metrics]
        shown = api.Experiment(time_created_secs=self.run.attempts[0].began, hparam_infos=options, metric_infos=tags)
        return _hparams(metadata.EXPERIMENT_TAG, HParamsPluginData(experiment=shown))


def _event(when: float, step: int, value: Summary.Value) -> Event:
    return Event(wall_time=when, step=step, summary=Summary(value=[value]))


def _hparams(tag: str, content: HParamsPluginData) -> Summary.Value:
    """Do what `tensorboard.plugins.hparams.summary` does, which needs TensorFlow."""
    return Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR)


def _markdown(tag: str, content: str) -> Summary.Value:
    return text_pb(tag, content.encode(errors="replace")).value[0]


def _image(content: bytes, tag: str) -> Iterator[Summary.Value]:
    if not content.startswith(_PNG) or len(content) < 24:
        raise ValueError("it is not a PNG file")
    width, height = _SIZE.unpack_from(content, 16)
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=content)
    yield Summary.Value(tag=tag, image=image)


def _text(content: bytes, tag: str) -> Iterator[Summary.Value]:
    yield _markdown(tag, content.decode(errors="replace"))


def _table(content: bytes, tag: str) -> Iterator[Summary.Value]:
    table = json.loads(content)
    names, rows = table["columns"], table["rows"]
    yield _markdown(tag, "\n".join(_line(cells) for cells in (names, ["---"] * len(names), *rows)))


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


def _hyperparameters(run: Run, wanted: Sequence[str] | None) -> dict[str, str | int | float | bool]:
    """Return the options that are a run's hyperparameters.

    `wanted` has keys, or the first parts of keys. None: the typed keys, the sweep's axes and `_WELL_KNOWN`. The whole
    config would be about 150 columns, nearly all of them equal in every run.
    """
    typed = {key: value or "removed" for key, value in override_values(run.run_dir).items()}
    # The choice of a group (`model=mlp`, `hooks=[ema]`) is not in the config: its typed value is shown.
    params = {**typed, **run.attempt.params}
    if wanted is None:
        named = filter(_OF_SEVERAL.fullmatch, params)
        keys = dict.fromkeys([*(() if run.sweep is None else run.sweep.axes), *typed, *_WELL_KNOWN, *named])
    else:
        keys = {key: None for key in params if any(f"{key}.".startswith(f"{start}.") for start in wanted)}
    shown = {key: params[key] for key in keys if key in params and key not in _NO_HYPERPARAMETERS}
    texts = {key: "null" if value is None else value for key, value in shown.items()}
    return {valid_utf8(key): valid_utf8(value) if isinstance(value, str) else value for key, value in texts.items()}
