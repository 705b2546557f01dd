"""Follower: sends the records of one run to one tracker, whatever fails, and keeps its position in a cursor."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Literal

from hydraloop.engine.interval import Every
from hydraloop.files import metrics_writer
from hydraloop.files.environment import shown
from hydraloop.files.metrics_log import FILENAME, Position, Reader, Record
from hydraloop.tracking.cursor import Cursor, path_of, sync_command
from hydraloop.tracking.tracker import (
    BusyError,
    Finish,
    GoneError,
    LostError,
    RefusedError,
    Tracker,
    UnusableError,
    own,
)

log = logging.getLogger(__name__)

BATCH = 200
"""Most records in one call: about 0.1 s of work for the slowest service, and few enough to show progress."""
_PAUSES = (1.0, 30.0)
"""Shortest and longest pause in seconds between two tries. Doubled up to 30 s, so a restarted server is found soon."""
_BUSY_PAUSES = (0.1, 5.0)
"""The same if the service is there but refuses (`BusyError`)."""
_LAST_PAUSE = 1.0
"""Longest pause in seconds after the run has ended, when little time is left."""
_FILES = 1.0
"""Seconds for which files are sent before records are read again, and between two such times."""
_PATIENCE = 3.0
"""Seconds for which a busy service may refuse before it is reported as a problem."""

_LONGEST = 150
"""Most characters of an error, and of what caused it."""

State = Literal["following", "caught up", "in trouble", "cut", "done", "given up"]
"""`cut`: a resume has cut the log. The run is opened again when that attempt is described."""


class Follower:
    """Sends one run to one tracker, step by step.

    The tracker's `memory` is the cursor's. `report` is called with the reason when nothing can be sent, and with None
    when that is over.
    """

    def __init__(
        self, tracker: Tracker, cursor: Cursor, run_dir: Path, name: str, report: Callable[[str | None], None]
    ) -> None:
        self._tracker = tracker
        self._cursor = cursor
        self._run_dir = run_dir
        self._name = name
        self._report = report
        self._sends_at = Every(tracker.options.get("interval", 1)).fires_at
        self._reader = Reader(run_dir / FILENAME, Position())
        self._batch = BATCH
        self._opened = False
        self._rewound = False
        self._finished = False
        self._in_trouble = False
        self._lost = False
        """Whether the service has lost records, and does not have everything again."""
        self.failures = 0
        """Errors in a row, without a record or file that arrived between them."""
        self.is_busy = False
        """Whether the last of them was a `BusyError`."""
        self._failing_since = 0.0
        self._next_try = 0.0
        self._next_files = 0.0
        self._saved = repr(cursor.memory)

    def wait(self, *, ending: bool) -> float:
        """Return the seconds to wait until the next `step`, if the last one did not return `following`."""
        if self.failures == 0:
            return 1.0
        seconds = max(0.0, self._next_try - monotonic())
        return min(seconds, _LAST_PAUSE) if ending else seconds

    def step(self, finish: Finish | None) -> State:
        """Do the next thing: open the run, send a batch, report how the run ended, or send files.

        Args:
            finish: how the run ended; None while it is running.
        """
        if self.failures and finish is None and monotonic() < self._next_try:
            return "in trouble"
        try:
            state = self._next(finish)
        except _CutError:
            return "cut"
        except UnusableError as error:
            position = shlex.quote(shown(path_of(self._run_dir, self._name)))
            again = f"rm {position} && {sync_command(self._run_dir, self._cursor.kind)}"
            self._report(f"{error}; `{again}` sends everything again" if isinstance(error, GoneError) else str(error))
            return "given up"
        except Exception as error:
            log.debug("to be repeated", exc_info=error)
            if isinstance(error, LostError):
                self._go_back(error.index)
                self._finished = self._cursor.complete = False
                if not self._lost:
                    self._lost = True
                    return "following"
            self._count_failure(error)
            if not self._in_trouble and (not self.is_busy or self.failing >= _PATIENCE):
                self._in_trouble = True
                self._report(described(error))
            return "in trouble"
        if state != "following":
            self._lost, self.failures = False, 0
        if self._in_trouble and self.failures == 0:
            self._in_trouble = False
            self._report(None)
        return state

    @property
    def failing(self) -> float:
        """Seconds since the first of the errors in a row; 0 if the last step had none."""
        return monotonic() - self._failing_since if self.failures else 0.0

    def _count_failure(self, error: Exception) -> None:
        """Count an error and decide when the next try is."""
        self.is_busy = isinstance(error, BusyError)
        shortest, longest = _BUSY_PAUSES if self.is_busy else _PAUSES
        pause = min(shortest * 2 ** min(self.failures, 16), longest)
        if self.failures == 0:
            self._failing_since = monotonic()
        self._next_try = monotonic() + pause
        self.failures += 1

    def _next(self, finish: Finish | None) -> State:
        if not self._opened:
            self._open()
        self._check_log()
        records, after = self._reader.read(self._batch)
        self._check_log()  # a cut is listed before the log is truncated
        if records:
            self._finished = self._cursor.complete = False
            wanted = [record for record in records if self._wants(record)]
            try:
                if wanted:
                    self._tracker.send(wanted)
            except RefusedError as error:
                if len(wanted) > 1:  # find the record: halve the batch until it is alone
                    self._batch = len(records) // 2
                    return "following"
                self._refuse(wanted[0], error)
            self._batch = min(2 * self._batch, BATCH)
            self._reader.position = after
            self._cursor.index = after.index
            self._arrived()
            if finish is None and monotonic() >= self._next_files:  # records may arrive faster than they are sent
                self._send_files()
            return "following"
        if finish is not None and self._cursor.index < finish.records:
            return "caught up"  # a file server does not show the last lines yet
        if finish is not None and not self._finished and not self._cursor.complete:
            self._tracker.finish(finish)
            self._finished = True
            self._arrived()
        if self._send_files():
            return "following"
        if finish is None:
            return "caught up"
        if not self._cursor.complete:
            self._cursor.complete = True
            self._save()
        return "done"

    def _wants(self, record: Record) -> bool:
        """Return whether `interval` sends a record: of every n-th iteration, and all others (with objects, of an
        evaluation, from before the first iteration)."""
        of_iteration = record.mode == "train" and record.iteration > 0 and not record.objects
        return not of_iteration or self._sends_at(record.iteration)

    def _send_files(self) -> bool:
        """Send files for at most a second. Returns whether there may be more."""
        end = monotonic() + _FILES
        self._next_files = end + _FILES
        while self._tracker.send_file():
            self._arrived()
            if monotonic() >= end:
                return True
        if repr(self._cursor.memory) != self._saved:
            self._save()
        return False

    def _arrived(self) -> None:
        """Store that the service has more than before. Lost records that arrive again do not end a trouble."""
        self._save()
        if not self._lost:
            self.failures = 0

    def _open(self) -> None:
        """Create the run at the service or find it again, after applying the cuts of a resume to the cursor."""
        cursor, number = self._cursor, self._tracker.run.attempt.number
        path = self._run_dir / FILENAME
        try:
            own(self._run_dir, path)
        except RefusedError as error:
            raise UnusableError(f"{error}: only the records of the run are sent") from error
        except FileNotFoundError:  # a run without records yet
            pass
        if not self._rewound:
            index = metrics_writer.still_there(path, cursor.index, cursor.cuts)
            self._go_back(self._tracker.rewound(index) if index < cursor.index else index)
            cursor.cuts = len(metrics_writer.cuts(path))
            self._rewound = True
        if cursor.attempt != number:
            cursor.complete = False
        self._tracker.open()
        cursor.attempt = number
        self._save()
        self._opened = True

    def _check_log(self) -> None:
        """Check that the log is the one that was opened: reading from the middle of another file returns garbage."""
        path = self._run_dir / FILENAME
        with suppress(FileNotFoundError):  # a run without records yet, or one that was moved
            if (
                len(metrics_writer.cuts(path)) != self._cursor.cuts
                or path.stat().st_size < self._reader.position.offset
            ):
                raise _CutError

    def _go_back(self, index: int) -> None:
        """Continue at line `index`."""
        self._reader.position = self._reader.find(index)
        self._cursor.index = index
        self._cursor.refused = [line for line in self._cursor.refused if line < index]

    def _refuse(self, record: Record, error: RefusedError) -> None:
        level = logging.INFO if self._cursor.refused else logging.WARNING  # one warning a run
        log.log(level, "line %d of %s is not sent: %s", record.index + 1, FILENAME, error)
        self._cursor.refused.append(record.index)

    def _save(self) -> None:
        self._cursor.where = self._tracker.where
        self._cursor.save(self._run_dir, self._name)
        self._saved = repr(self._cursor.memory)


class _CutError(Exception):
    """The log is not the one that was opened."""


def described(error: BaseException) -> str:
    """Describe an error in one line, with the operating system's error that caused it: `Connection refused`."""
    *_, cause = causes(error)
    text = f"{type(error).__name__}: {error}"
    if isinstance(cause, OSError) and reason(error) not in text:
        text = f"{text[:_LONGEST]} ({type(cause).__name__}: {cause})"
    return " ".join(text.split())[: 2 * _LONGEST]


def reason(error: BaseException) -> str:
    """Return the text of the error that caused an error; of the operating system's errors, without the number."""
    *_, cause = causes(error)
    return str(getattr(cause, "strerror", None) or cause)


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, its cause, the cause of that, and so on."""
    found: BaseException | None = error
    while found is not None:
        yield found
        found = found.__cause__ or (None if found.__suppress_context__ else found.__context__)
