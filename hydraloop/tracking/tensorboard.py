"""TensorBoardTracker: writes event files. Needs tensorboard, but neither torch nor TensorFlow."""

from __future__ import annotations

import json
import logging
import shlex
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from PIL import Image
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.histogram_pb2 import HistogramProto
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams import api_pb2 as api
from tensorboard.plugins.hparams import metadata
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData, SessionEndInfo
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.plugins.text.summary_v2 import text_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from hydraloop.files.atomic import file_name
from hydraloop.files.environment import shown
from hydraloop.files.metrics_log import ObjectKind, Record
from hydraloop.tracking.run_description import override_values
from hydraloop.tracking.tracker import Finish, LostError, Run, Tracker, own, own_folder

log = logging.getLogger(__name__)

FOLDER = "tensorboard"
"""Folder of the event files, in the run directory."""
_NAME = "events.out.tfevents.{}.hydraloop"
_ODD = r"[^\w.,=+()\[\]-]"
_WELL_KNOWN = (
    *("seed", "task.model._target_", "optimizer._target_", "optimizer.lr", "optimizer.weight_decay"),
    *("data.loader.batch_size", "precision.name"),
)
"""Shown for every run, so that runs of different command lines can be compared: these options affect the result."""
_TYPES = {bool: api.DATA_TYPE_BOOL, str: api.DATA_TYPE_STRING}
"""Types of hyperparameters other than numbers."""


class TensorBoardTracker(Tracker):
    """Writes `<run_dir>/tensorboard/events.out.tfevents.…`.

    A job of a sweep writes to `tensorboard/<name of the job>/`, because TensorBoard names a run after its folder.

    Each sender writes all records to a new file and empties the older ones, so that each record is there once, whatever
    was killed. torch's `SummaryWriter` would need 180 MiB and 1.4 s of CPU more, for the import of torch.
    """

    def __init__(self, options: dict[str, Any], run: Run, memory: dict[str, Any]) -> None:
        super().__init__(options, run, memory)
        self._folder = run.run_dir / FOLDER
        if run.sweep is not None:
            self._folder /= file_name(run.name.lstrip("."), _ODD) or "job"
        self._params = _hyperparameters(run)
        self._file: IO[bytes] | None = None
        self._evaluated: dict[str, None] = {}
        """Tags of evaluations."""
        self._warned = False

    def open(self) -> None:
        """Create the folder."""
        own_folder(self.run.run_dir, self._folder)

    def send(self, records: Sequence[Record]) -> None:
        """Write an event for each record.

        Raises:
            LostError: this process has not written the records before. All are sent again.
        """
        try:
            if self._file is None:
                self._begin()
                if records[0].index > 0:
                    raise LostError(0)
            for record in records:
                if record.mode != "train" and "loss" in record.values:
                    self._evaluated.update(dict.fromkeys(record.metrics))
                self._write(record.timestamp, record.iteration, self._values(record))
        except LostError:
            raise
        except Exception:  # a part may be in the file
            self.close()
            raise

    def finish(self, finish: Finish) -> None:
        """Write the columns of the HPARAMS table, and the end of the session."""
        if self._file is None:
            self._begin()
            raise LostError(0)
        ended = time.time()
        status = api.STATUS_SUCCESS if finish.exit_code == 0 else api.STATUS_FAILURE
        info = HParamsPluginData(session_end_info=SessionEndInfo(status=status, end_time_secs=ended))
        self._write(ended, 0, [self._columns(), _hparams(metadata.SESSION_END_INFO_TAG, info)])
        self.close()

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            with suppress(OSError):  # what could not be flushed before
                self._file.close()
            self._file = None

    @property
    def where(self) -> str:
        """The command that shows the run, or all jobs of its sweep."""
        folder = self.run.run_dir / FOLDER if self.run.sweep is None else self.run.sweep.folder
        return f"tensorboard --logdir {shlex.quote(shown(folder))}"

    def _begin(self) -> None:
        """Begin a file with the hyperparameters and configs."""
        began = self.run.attempts[0].began
        old = sorted(self._folder.glob(_NAME.format("*")))
        for path in old:  # a TensorBoard that is open would read no file after one that is deleted
            path.unlink()
            path.touch()
        number = int(old[-1].name.split(".")[3]) + 1 if old else int(began)
        self._file = (self._folder / _NAME.format(f"{number:010}")).open("xb")
        self._put(Event(wall_time=began, file_version="brain.Event:2"))
        # A TensorBoard that is open drops what it has read.
        self._put(Event(wall_time=began, session_log=SessionLog(status=SessionLog.START)))
        session = hparams_pb(self._params, trial_id="", start_time_secs=began)  # else equal runs would be one row
        self._write(began, 0, session.value)
        for one in self.run.attempts:
            self._write(one.began, one.iteration, text_pb("config", f"```yaml\n{one.config}\n```").value)

    def _write(self, when: float, step: int, values: Iterable[Summary.Value]) -> None:
        self._put(Event(wall_time=when, step=step, summary=Summary(value=values)))

    def _put(self, event: Event) -> None:
        assert self._file is not None
        RecordWriter(self._file).write(event.SerializeToString())
        self._file.flush()

    def _values(self, record: Record) -> Iterator[Summary.Value]:
        """Yield a record's numbers and objects. The first object that cannot be shown is a warning."""
        for tag, value in record.metrics.items():
            name = f"train_{tag}" if tag.startswith("perf/") else tag  # only the first two groups are open: test, train
            yield Summary.Value(tag=name, simple_value=value)
        for one in record.objects:
            try:
                if one.kind not in _SHOWN:
                    raise ValueError("it is a file")
                yield from [*_SHOWN[one.kind](own(self.run.run_dir, self.run.run_dir / one.path), one.name)]
            except Exception as error:  # a damaged file can raise any error
                level = logging.INFO if self._warned else logging.WARNING
                log.log(level, "TensorBoard cannot show %s, and others will be skipped, too: %s", one.path, error)
                self._warned = True

    def _columns(self) -> Summary.Value:
        """Return the columns of the HPARAMS table: the hyperparameters, the metrics of evaluations and `train/loss`.

        Without it, TensorBoard would treat every scalar as a metric and show the first five. Swept keys come first.
        """
        axes = () if self.run.sweep is None else self.run.sweep.axes
        types = {name: _TYPES.get(type(value), api.DATA_TYPE_FLOAT64) for name, value in self._params.items()}
        options = [api.HParamInfo(name=name, type=found, differs=name in axes) for name, found in types.items()]
        tags = [api.MetricInfo(name=api.MetricName(tag=tag)) for tag in (*self._evaluated, "train/loss")]
        experiment = api.Experiment(
            time_created_secs=self.run.attempts[0].began, hparam_infos=options, metric_infos=tags
        )
        return _hparams(metadata.EXPERIMENT_TAG, HParamsPluginData(experiment=experiment))


def _hparams(tag: str, content: HParamsPluginData) -> Summary.Value:
    """Do what `tensorboard.plugins.hparams.summary` does, which needs TensorFlow."""
    return Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(content), tensor=metadata.NULL_TENSOR)


def _image(path: Path, tag: str) -> Iterator[Summary.Value]:
    with Image.open(path) as image:
        width, height = image.size
    image = Summary.Image(height=height, width=width, colorspace=3, encoded_image_string=path.read_bytes())
    yield Summary.Value(tag=tag, image=image)


def _text(path: Path, tag: str) -> Iterator[Summary.Value]:
    yield from text_pb(tag, path.read_text(encoding="utf-8")).value


def _table(path: Path, tag: str) -> Iterator[Summary.Value]:
    table = json.loads(path.read_bytes())
    names, rows = table["columns"], table["rows"]
    yield from text_pb(tag, "\n".join(_line(cells) for cells in (names, ["---"] * len(names), *rows))).value


def _line(cells: Iterable[Any]) -> str:
    texts = ("" if cell is None else " ".join(str(cell).split()).replace("|", "\\|") for cell in cells)
    return f"| {' | '.join(texts)} |"


def _histograms(path: Path, tag: str) -> Iterator[Summary.Value]:
    for name, counted in json.loads(path.read_bytes()).items():
        nonfinite = counted.pop("nonfinite")
        if counted["bucket"]:
            yield Summary.Value(tag=name, histo=HistogramProto(**counted))
        if nonfinite:
            yield Summary.Value(tag=f"nonfinite/{name}", simple_value=nonfinite)


_SHOWN: dict[ObjectKind, Any] = {"image": _image, "text": _text, "table": _table, "histogram": _histograms}


def _hyperparameters(run: Run) -> dict[str, str | int | float | bool]:
    """Return the typed options, the sweep's axes and `_WELL_KNOWN`.

    The whole config would be about 150 columns, nearly all of them equal in every run.
    """
    typed = override_values(run.run_dir)
    # The choice of a group (`model=mlp`, `hooks=[ema]`) is not in the config: its typed value is shown.
    params = {**typed, **run.attempt.params}
    keys = dict.fromkeys([*(() if run.sweep is None else run.sweep.axes), *typed, *_WELL_KNOWN])
    named = {key: params[key] for key in keys if key in params}
    return {key: "null" if value is None else value for key, value in named.items()}
