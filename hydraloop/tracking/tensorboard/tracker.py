"""TensorBoardTracker: writes event files. Needs tensorboard, but neither torch nor TensorFlow."""

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
"""Folder of the event files, in the run directory."""


class TensorBoardTracker(Tracker):
    """Writes `<run_dir>/tensorboard/events.out.tfevents.…`, one file for each attempt.

    Each record is one event with its scalars (`train/loss`) at step = iteration, its picture and its histograms. A
    session of the HPARAMS tab begins before the first record and ends after the last one.

    Each record is written once. `memory` has the number of confirmed bytes of the attempt's file, and is saved together
    with the cursor. Bytes that a killed process wrote after these are overwritten with the same events. If a resume has
    cut the log, the same records are cut from the older files: each record is one event, so they are found by counting.
    The new file's first event is `SessionLog.START` (PyTorch's `purge_step`), which tells a TensorBoard that has read
    those records already. That event alone would not suffice, because TensorBoard's fast loader ignores it.

    `memory`: `files`, for each attempt `{"name", "head": bytes before the first record, "size": confirmed bytes,
    "first": index of its first record, "columns": whether the table's columns are written}`; `cut`, until it is done:
    `{"index", "iteration"}`.
    """

    @classmethod
    def preload(cls) -> None:
        import tensorboard.plugins.hparams.api_pb2  # noqa: F401

    def __init__(self, options: dict[str, Any], run: Run, memory: dict[str, Any]) -> None:
        super().__init__(options, run, memory)
        self._folder = run.run_dir / FOLDER
        self._summaries = Summaries(run.run_dir, pictures=options.get("pictures", True))

    def rewound(self, index: int, iteration: int, cut: Sequence[Record]) -> int:
        """Remember what is to be cut from the files; `open` does it."""
        self.memory["cut"] = {"index": index, "iteration": iteration}
        return index

    def open(self) -> None:
        """Cut older files as the log was cut, and begin this attempt's file if it does not exist.

        Raises:
            UnusableError: a file exists at the path of the folder.
        """
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except (FileExistsError, NotADirectoryError) as error:
            raise UnusableError(f"{self._folder} is not a folder: move it away") from error
        names = self._names()
        if "files" not in self.memory:  # all records are sent again, so existing files are replaced
            for name in names:
                (self._folder / name).unlink(missing_ok=True)
        files = [entry for entry in self.memory.get("files", []) if self._revised(entry, current=names[-1])]
        if not files or files[-1]["name"] != names[-1]:
            head = EventFile(self._folder / names[-1]).write(self._head(), at=0)
            files.append({"name": names[-1], "head": head, "size": head, "first": None, "columns": False})
        self.memory["files"] = files
        self.memory.pop("cut", None)

    def send(self, records: Sequence[Record]) -> None:
        """Append the records to the attempt's file, and flush once."""
        entry = self._current()
        columns = entry["columns"] or not any(map(self._is_evaluation, records))
        size = self._file.write(self._events(records, columns=columns), at=entry["size"])
        first = records[0].index if entry["first"] is None else entry["first"]
        entry.update(size=size, first=first, columns=entry["columns"] or not columns)

    def finish(self, finish: Finish) -> None:
        """End the session of the HPARAMS tab.

        This event is not confirmed in `memory`, so that records of a resumed run overwrite it: TensorBoard would
        otherwise use the first end that it finds.
        """
        entry, ended = self._current(), time.time()
        self._file.write([_event(_summary(hparams.session_end(finish, ended)), ended)], at=entry["size"])

    @property
    def where(self) -> str:
        """The command that shows the run."""
        here = Path.cwd()
        folder = self._folder.relative_to(here) if self._folder.is_relative_to(here) else self._folder
        return f"tensorboard --logdir {shlex.quote(str(folder))}"

    def _current(self) -> dict[str, Any]:
        """Return the entry of the attempt's file. If the file was deleted, it is written again."""
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
        """Names that only records of an evaluation have, and not those that hooks log between them."""
        starts = (key.split(".") for key in self.run.attempt.params)
        return {"loss", *(parts[2] for parts in starts if parts[:2] == ["task", "metrics"] and len(parts) > 2)}

    def _is_evaluation(self, record: Record) -> bool:
        return record.mode != "train" and not self._measured.isdisjoint(record.values)

    def _names(self) -> list[str]:
        """Return the names of the attempts' files, which must sort in order and be the same in each process.

        A clock may have been set back, or differ between the hosts of two attempts.
        """
        names, second = [], 0
        for attempt in self.run.attempts:
            second = max(int(attempt.began), second + 1)
            host = attempt.tags.get("host", "localhost")
            names.append(f"events.out.tfevents.{second:010d}.{host}.{attempt.pid}.{attempt.number}")
        return names

    def _revised(self, entry: dict[str, Any], *, current: str) -> bool:
        """Cut from a file what was cut from the log, and from an older file the end of the session.

        Returns:
            Whether the file exists.
        """
        file = EventFile(self._folder / entry["name"])
        if file.size < entry["size"]:
            log.warning("%s was shortened or deleted: some records are missing in it", file.path)
            entry["size"] = file.whole(entry["size"])
            if entry["size"] < entry["head"]:
                file.path.unlink(missing_ok=True)
                return False
        cut = self.memory.get("cut")
        if cut is not None and entry["first"] is not None:
            kept = max(0, cut["index"] - entry["first"])
            entry["size"] = file.end_of(kept, after=entry["head"])
        if entry["name"] != current:
            file.cut(entry["size"])
        return True

    def _head(self) -> Iterator[Any]:
        """Yield the events before an attempt's first record. They are the same each time they are written."""
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
        """Yield one event for each record.

        The first evaluation's event also has the columns of the HPARAMS table, because the metrics are known then.
        """
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
