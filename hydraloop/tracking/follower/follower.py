"""Follower: sends the records of one run to one tracker, whatever fails, and keeps its position in a cursor."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Literal

from hydraloop.run.record_log import FILENAME, Position, Reader, Record
from hydraloop.tracking.follower import cutting
from hydraloop.tracking.follower.cursor import Cursor
from hydraloop.tracking.tracker import Finish, LostError, RefusedError, Tracker, UnusableError

log = logging.getLogger(__name__)

BATCH = 200
"""Most records in one call: about 0.1 s of work for the slowest service, and few enough to show progress."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 30.0
"""Seconds between two tries. The pause doubles up to 30 s, so a restarted server is found within that time."""
_FILES = 1.0
"""Seconds for files before the next look for records, and between two such times."""
_LAST_PAUSE = 1.0
"""Longest pause in seconds after the run has ended, when little time is left."""

State = Literal["following", "caught up", "in trouble", "done", "given up"]


@dataclass(slots=True)
class Trouble:
    """The reason why nothing can be sent."""

    text: str
    final: bool
    """Whether the follower gives up."""


class Follower:
    """Sends one run to one tracker, step by step.

    Args:
        tracker: the service. Its `memory` is the cursor's.
        cursor: the position in the log.
        run_dir: directory of the run.
        name: name of the tracker hook.
        told: called with each new trouble, and with None when it is over.
    """

    def __init__(
        self, tracker: Tracker, cursor: Cursor, run_dir: Path, name: str, told: Callable[[Trouble | None], None]
    ) -> None:
        self._tracker, self._cursor, self._run_dir, self._name = tracker, cursor, run_dir, name
        self._told = told
        self._reader = Reader(run_dir / FILENAME, Position(cursor.offset, cursor.index))
        self._opened = self._rewound = self._refused = False
        self._trouble: Trouble | None = None
        self._pause = _FIRST_PAUSE
        self._next_try = self._files_due = 0.0
        self._saved = repr(cursor.memory)

    def wait(self, *, ending: bool) -> float:
        """Return the seconds to wait until the next `step`, if the last one did not return `following`."""
        if self._trouble is None:
            return 1.0
        return max(0.0, min(self._next_try - monotonic(), _LAST_PAUSE if ending else _LONGEST_PAUSE))

    def step(self, finish: Finish | None) -> State:
        """Do the next thing: open the run, send a batch, send files, or report how the run ended.

        Args:
            finish: how the run ended; None while it is running.
        """
        if self._trouble is not None and finish is None and monotonic() < self._next_try:
            return "in trouble"
        try:
            state = self._step(finish)
        except UnusableError as error:
            self._report(Trouble(str(error), final=True))
            return "given up"
        except Exception as error:
            log.debug("to be repeated", exc_info=error)
            self._report(Trouble(described(error), final=False))
            self._next_try = monotonic() + self._pause
            self._pause = min(2 * self._pause, _LONGEST_PAUSE)
            return "in trouble"
        if self._trouble is not None:
            self._trouble = None
            self._told(None)
        self._pause = _FIRST_PAUSE
        return state

    def _step(self, finish: Finish | None) -> State:
        try:
            return self._next(finish)
        except LostError as error:
            self._go_back(error.index)
            self._cursor.finished = False
            self._save()
            return "following"

    def _next(self, finish: Finish | None) -> State:
        if not self._opened:
            self._open()
        self._check_log()
        records, after = self._reader.read(BATCH)
        if records:
            self._cursor.finished = False
            refused = self._send(records)
            self._cursor.refused += refused
            self._reader.move(after)
            self._cursor.offset, self._cursor.index = after.offset, after.index
            self._save()
            if finish is None and monotonic() >= self._files_due:  # records may arrive faster than they are sent
                self._send_files()
            return "following"
        if finish is None:
            return "following" if self._send_files() else "caught up"
        if not self._cursor.finished:
            self._tracker.finish(finish)
            self._cursor.finished = True
            self._save()
        return "following" if self._send_files() else "done"

    def _send_files(self) -> bool:
        """Send files for at most a second. Returns whether there may be more."""
        end = monotonic() + _FILES
        while more := self._tracker.send_file():
            self._save_changed()
            if monotonic() >= end:
                break
        self._save_changed()
        self._files_due = monotonic() + _FILES
        return more

    def _open(self) -> None:
        """Create the run at the service or find it again, after applying the cuts of a resume to the cursor."""
        cursor, number = self._cursor, self._tracker.run.attempt.number
        path = self._run_dir / FILENAME
        if not self._rewound:
            index, iteration, gone = cutting.sent_and_cut(path, cursor.index, cursor.cuts)
            if gone:
                self._go_back(self._tracker.rewound(index, iteration, gone))
            cursor.cuts = len(cutting.cuts(path))
            self._rewound = True
        if cursor.attempt != number:
            cursor.finished = False
        self._tracker.open()
        cursor.attempt, cursor.where = number, self._tracker.where
        self._save()
        self._opened = True

    def _check_log(self) -> None:
        """Check that the log is the one that was opened: reading from the middle of another file returns garbage.

        Raises:
            UnusableError: another process has cut or replaced the log.
        """
        path = self._run_dir / FILENAME
        with suppress(FileNotFoundError):  # a run without records yet, or one that was moved
            if len(cutting.cuts(path)) != self._cursor.cuts or path.stat().st_size < self._cursor.offset:
                raise UnusableError(f"{path.name} was cut or replaced by another process after its records were sent")

    def _go_back(self, index: int) -> None:
        """Set the cursor back to line `index`."""
        place = self._reader.find(index)
        self._reader.move(place)
        self._cursor.offset, self._cursor.index = place.offset, place.index
        self._cursor.refused = [line for line in self._cursor.refused if line < index]

    def _send(self, records: Sequence[Record]) -> list[int]:
        """Send all records. Returns the indices of those that the service refuses, found by halving the batch."""
        try:
            self._tracker.send(records)
        except RefusedError as error:
            if len(records) > 1:
                half = len(records) // 2
                return [*self._send(records[:half]), *self._send(records[half:])]
            level = logging.INFO if self._cursor.refused or self._refused else logging.WARNING  # one warning a run
            self._refused = True
            log.log(level, "line %d of %s is not sent: %s", records[0].index + 1, FILENAME, error)
            return [records[0].index]
        return []

    def _save(self) -> None:
        self._cursor.where = self._tracker.where
        self._cursor.save(self._run_dir, self._name)
        self._saved = repr(self._cursor.memory)

    def _save_changed(self) -> None:
        if repr(self._cursor.memory) != self._saved:
            self._save()

    def _report(self, trouble: Trouble) -> None:
        if self._trouble is None or trouble.final:
            self._told(trouble)
        self._trouble = trouble


def described(error: BaseException) -> str:
    """Describe an error in one line, with the operating system's error that caused it: `Connection refused`."""
    text, cause = _line(error, 300), error
    while (deeper := cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)) is not None:
        cause = deeper
    if cause is not error and isinstance(cause, OSError):
        text = f"{_line(error, 120)} ({_line(cause, 150)})"
    return text


def _line(error: BaseException, longest: int) -> str:
    text = " ".join(str(error).split()) or repr(error)
    return f"{type(error).__name__}: {text[:longest]}{'…' if len(text) > longest else ''}"
