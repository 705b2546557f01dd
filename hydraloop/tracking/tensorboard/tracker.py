"""TensorBoardTracker: a run's records as TensorBoard's event files. Needs tensorboard; neither torch nor TensorFlow."""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from hydraloop.run.record_log import Record
from hydraloop.tracking.tensorboard import hparams
from hydraloop.tracking.tensorboard.event_file import EventFile
from hydraloop.tracking.tensorboard.summaries import Summaries
from hydraloop.tracking.tracker import Finish, Run, Tracker, UnusableError

log = logging.getLogger(__name__)

FOLDER = "tensorboard"
"""Of the event files, in the run directory."""


class TensorBoardTracker(Tracker):
    """Writes `<run_dir>/tensorboard/events.out.tfevents.…`, one file an attempt.

    Each record is one event: scalars `train/loss` and the like at step = iteration, a picture, histograms. A session of
    the HPARAMS tab begins in front of them and ends behind them.

    Each record is there once. `memory` says how many bytes of the attempt's file are confirmed, and is saved together
    with the cursor: what a process that died had written behind them is written over with the same events. Where a
    resumed run has cut the log, the same records are cut from the older files: each record being one event, the n-th
    record is found by counting. A TensorBoard that has read them already is told by the new file's first events
    (`SessionLog.START`, PyTorch's `purge_step`); files alone would not do, since TensorBoard's fast reader ignores
    these, and would show, say, the test of the first attempt for ever.

    `memory`: `files`, for each attempt `{"name", "head": bytes in front of the first record, "size": confirmed bytes,
    "first": index of its first record, "columns": whether the table's columns are in it}`; `cut`, until it is done:
    `{"index", "iteration"}`.
    """

    kind = "tensorboard"

    def __init__(self, options: dict[str, Any], run: Run, memory: dict[str, Any]) -> None:
        super().__init__(options, run, memory)
        self._folder = run.run_dir / FOLDER
        self._summaries = Summaries(run.run_dir, pictures=options.get("pictures", True))

    def rewound(self, index: int, iteration: int, cut: Sequence[Record]) -> int:
        """Remember what is to be cut from the files."""
        self.memory["cut"] = {"index": index, "iteration": iteration}
        return index

    def open(self) -> None:
        """Bring older files to what is in the log, and begin this attempt's, if it is not there.

        Raises:
            UnusableError: there is a file where the folder belongs.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UnusableError(f"{self._folder} is no folder: move it away") from error
        names = self._names()
        if "files" not in self.memory:  # All is written anew, whatever is there.
            for name in names:
                (self._folder / name).unlink(missing_ok=True)
        files = [entry for entry in self.memory.get("files", []) if self._revised(entry, current=names[-1])]
        if not files or files[-1]["name"] != names[-1]:
            head = EventFile(self._folder / names[-1]).write(self._head(), at=0)
            files.append({"name": names[-1], "head": head, "size": head, "first": None, "columns": False})
        self.memory["files"] = files
        self.memory.pop("cut", None)

    def send(self, records: Sequence[Record]) -> None:
        """Append them to the attempt's file, and flush once."""
        entry = self._current()
        columns = entry["columns"] or not any(map(self._is_evaluation, records))
        size = self._file.write(self._events(records, columns=columns), at=entry["size"])
        first = records[0].index if entry["first"] is None else entry["first"]
        entry.update(size=size, first=first, columns=entry["columns"] or not columns)

    def finish(self, finish: Finish) -> None:
        """End the session of the HPARAMS tab.

        Not confirmed in `memory`: whatever is sent after it, by a resumed run, is written over it. TensorBoard would
        believe the first end it finds.
        """
        entry, ended = self._current(), time.time()
        self._file.write([_event(_summary(hparams.session_end(finish, ended)), ended)], at=entry["size"])

    @property
    def where(self) -> str:
        """The command that shows it."""
        here = Path.cwd()
        folder = self._folder.relative_to(here) if self._folder.is_relative_to(here) else self._folder
        return f"tensorboard --logdir {shlex.quote(str(folder))}"

    def _current(self) -> dict[str, Any]:
        """What is known of the attempt's file, which is begun again where somebody has tidied up."""
        if self._file.size < self._entry["size"]:
            self.open()
        return self._entry

    @property
    def _entry(self) -> dict[str, Any]:
        entry: dict[str, Any] = self.memory["files"][-1]
        return entry

    @property
    def _file(self) -> EventFile:
        return EventFile(self._folder / self._entry["name"])

    @cached_property
    def _params(self) -> dict[str, hparams.Value]:
        return hparams.chosen(self.run, self.options.get("hparams"))

    @cached_property
    def _measured(self) -> set[str]:
        """Names that records of an evaluation have, other than those that hooks make meanwhile."""
        starts = (key.split(".") for key in self.run.attempt.params)
        return {"loss", *(parts[2] for parts in starts if parts[:2] == ["task", "metrics"] and len(parts) > 2)}

    def _is_evaluation(self, record: Record) -> bool:
        return record.mode != "train" and not self._measured.isdisjoint(record.values)

    def _names(self) -> list[str]:
        """Of the attempts' files, the same in each process that asks; each sorts behind the one before, as it has to.

        A clock may have been set back since, or differ between the hosts of two attempts.
        """
        names, second = [], 0
        for attempt in self.run.attempts:
            second = max(int(attempt.began), second + 1)
            host = attempt.tags.get("host", "localhost")
            names.append(f"events.out.tfevents.{second:010d}.{host}.{attempt.pid}.{attempt.number}")
        return names

    def _revised(self, entry: dict[str, Any], *, current: str) -> bool:
        """Cut from a file what was cut from the log, and from an older one the session's end, too.

        Returns:
            Whether there is such a file.
        """
        file = EventFile(self._folder / entry["name"])
        if file.size < entry["size"]:
            log.warning("%s is shorter than it was left, or missing: some records are not in it", file.path)
            entry["size"] = file.whole(entry["size"])
            if entry["size"] < entry["head"]:
                file.path.unlink(missing_ok=True)
                return False
        cut = self.memory.get("cut")
        if cut is not None and entry["first"] is not None:
            kept = max(0, cut["index"] - entry["first"])
            entry["size"] = file.behind(kept, after=entry["head"])
        if entry["name"] != current:
            file.cut(entry["size"])
        return True

    def _head(self) -> Iterator[Any]:
        """What stands in front of an attempt's first record; the same each time it is written."""
        from tensorboard.compat.proto import event_pb2

        attempt = self.run.attempt
        yield event_pb2.Event(
            wall_time=attempt.began,
            file_version="brain.Event:2",
            source_metadata=event_pb2.SourceMetadata(writer="hydraloop.tracking.tensorboard.tracker"),
        )
        cut = self.memory.get("cut")
        if cut is not None:
            start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
            yield event_pb2.Event(wall_time=attempt.began, step=cut["iteration"] + 1, session_log=start)
        yield _event(_summary(hparams.session_start(self.run, self._params)), attempt.began)

    def _events(self, records: Sequence[Record], *, columns: bool) -> Iterator[Any]:
        """One for each record; with the first evaluation's the table's columns, unless they are there: now it is known
        what is measured."""
        for record in records:
            summary = self._summaries.of(record)
            if not columns and self._is_evaluation(record):
                columns = True
                tags = [f"{mode}/{name}" for mode in ("val", "test") for name in record.values]
                summary.value.append(hparams.experiment(self.run, self._params, [*tags, "train/loss"]))
            yield _event(summary, record.timestamp, record.iteration)


def _summary(*values: Any) -> Any:
    from tensorboard.compat.proto import summary_pb2

    return summary_pb2.Summary(value=values)


def _event(summary: Any, when: float, step: int = 0) -> Any:
    from tensorboard.compat.proto import event_pb2

    return event_pb2.Event(wall_time=when, step=step, summary=summary)
