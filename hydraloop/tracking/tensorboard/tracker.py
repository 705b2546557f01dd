"""TensorBoardTracker: writes event files. Needs tensorboard, but neither torch nor TensorFlow."""

from __future__ import annotations

import re
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.plugins.hparams.summary_v2 import hparams_pb
from tensorboard.summary.writer.record_writer import RecordWriter

from hydraloop.run.record_log import Record
from hydraloop.tracking.tensorboard.summaries import Summaries, experiment, hyperparameters, session_end, text
from hydraloop.tracking.tracker import Finish, LostError, Run, Tracker, UnusableError

FOLDER = "tensorboard"
"""Folder of the event files, in the run directory."""
_NAME = "events.out.tfevents.{}.hydraloop"
_ODD = re.compile(r"[^\w.,=+()\[\]-]")


class TensorBoardTracker(Tracker):
    """Writes `<run_dir>/tensorboard/events.out.tfevents.…`, one file for each attempt.

    Each record is one event with its scalars (`train/loss`) at step = iteration, and its objects. The config is text.
    A session of the HPARAMS tab begins before the first record and ends after the last one. A job of a sweep writes to
    `tensorboard/<name of the job>/`, because TensorBoard names a run after its folder.

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
            self._folder /= _ODD.sub("_", run.name).encode()[:200].decode(errors="ignore").lstrip(".") or "job"
        self._summaries = Summaries(run.run_dir, pictures=options.get("pictures", True))
        self._params = hyperparameters(run, options.get("hparams"))

    def rewound(self, index: int, iteration: int, cut: Sequence[Record]) -> int:
        """Write everything again."""
        self.memory.clear()
        return 0

    def open(self) -> None:
        """Begin this attempt's file if it does not exist.

        Raises:
            UnusableError: a file exists at the path of the folder.
        """
        attempt, before = self.run.attempt, self.memory.get("file")
        name = _NAME.format(f"{self.run.attempts[0].began + attempt.number:010.0f}")  # sorts in the order of attempts
        if before == name:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UnusableError(f"{self._folder} is not a folder: move it away") from error
        head = [Event(wall_time=attempt.began, file_version="brain.Event:2")]
        if before is None:
            for path in self._folder.glob(_NAME.format("*")):
                path.write_bytes(b"")  # a TensorBoard that is open would read no file after one that is deleted
            # It also drops the points that it has read.
            head.append(Event(wall_time=attempt.began, session_log=SessionLog(status=SessionLog.START)))
            began = self.run.attempts[0].began
            session = hparams_pb(self._params, trial_id="", start_time_secs=began)  # else equal runs would be one row
            head.append(_event(attempt.began, 0, session.value[0]))
        else:
            self._write(before, self.memory["size"], ())  # removes the end of the session
        new = self.run.attempts[self.memory.get("attempts", 0) :]
        head += [_event(one.began, one.iteration, text("config", f"```yaml\n{one.config}\n```")) for one in new]
        (self._folder / name).touch()
        self.memory.update(size=self._write(name, 0, head), file=name, attempts=len(self.run.attempts))

    def send(self, records: Sequence[Record]) -> None:
        """Append an event for each record, and flush once.

        The first evaluation's event also has the columns of the HPARAMS table, because the metrics are known then.
        """
        self.open()
        columns, events = self.memory.get("columns", False), []
        for record in records:
            summary = self._summaries.of(record)
            if not columns and record.mode != "train" and "loss" in record.values:
                columns = True
                tags = [f"{mode}/{name}" for mode in ("val", "test") for name in record.values]
                summary.value.append(experiment(self.run, self._params, [*tags, "train/loss"]))
            events.append(Event(wall_time=record.timestamp, step=record.iteration, summary=summary))
        self.memory.update(size=self._write(self.memory["file"], self.memory["size"], events), columns=columns)

    def finish(self, finish: Finish) -> None:
        """End the session of the HPARAMS tab.

        This event is not confirmed in `memory`, so that records of a resumed run replace it: TensorBoard would
        otherwise use the first end that it finds.
        """
        self.open()
        ended = time.time()
        end = _event(ended, 0, session_end(finish, ended))
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
        if not path.exists() or path.stat().st_size < size:
            self.memory.clear()
            raise LostError(0)
        with path.open("rb+") as file:
            file.truncate(size)
            file.seek(size)
            for event in events:
                RecordWriter(file).write(event.SerializeToString())
            return file.tell()


def _event(when: float, step: int, value: Summary.Value) -> Event:
    return Event(wall_time=when, step=step, summary=Summary(value=[value]))
