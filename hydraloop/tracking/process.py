"""The process of a follower: what it is told by the training process, and what it tells.

Both are lines of JSON. In: the hook's options; `begin` when the run is described and its log is cut; `finish` when it
has ended. Out: what there is to say in the terminal. The end of the input means that the training process is gone: what
it has left is sent, and the run closed, in the same bounded time.
"""

from __future__ import annotations

import json
import logging
import os
import select
import threading
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import IO, Any

from hydraloop.tracking import description
from hydraloop.tracking.cursor import Cursor
from hydraloop.tracking.follower import Follower, Trouble
from hydraloop.tracking.kinds import tracker_of
from hydraloop.tracking.locks import lock_of
from hydraloop.tracking.tracker import Finish, Run, Tracker

log = logging.getLogger(__name__)

LEFT = 3
"""Exit code where something was not sent in time."""
MARGIN = 1.0
"""Seconds after `flush_timeout` at which the process is ended from outside, whatever hangs."""
_UNTIL_FREE = 30.0
"""Seconds to wait for the follower of an earlier process, which ends by itself."""


def main(run_dir: Path, name: str) -> int:
    """Follow a run until it has ended. Returns the exit code: 0 where everything was sent, else `LEFT`."""
    tell = _Tell(_private_stdout())
    _log_to_stderr(tell)
    inbox = Inbox()
    given = inbox.settings()
    if given is None or not inbox.begins():
        return 0
    with lock_of(run_dir, name).acquire(timeout=_UNTIL_FREE):
        run = description.read(run_dir)
        assert run is not None, "the training process describes the run before it says begin"
        cursor = Cursor.load(run_dir, name) or Cursor(given["kind"], given["masked"], given["log"])
        cursor.kind, cursor.options, cursor.log = given["kind"], given["masked"], given["log"]
        cursor.save(run_dir, name)  # for `sync.py`, whatever happens now
        tracker = tracker_of(cursor.kind)(given["options"], run, cursor.memory)
        try:
            state = _follow(Follower(tracker, cursor, run_dir, name, tell.trouble), inbox, run, tell, tracker)
        finally:
            tracker.close()
    return 0 if state == "done" else LEFT


def _follow(follower: Follower, inbox: Inbox, run: Run, tell: _Tell, tracker: Tracker) -> str:
    finish: Finish | None = None
    opened = False
    while True:
        state = follower.step(finish)
        if not opened and state not in ("in trouble", "given up"):
            opened = True
            tell.say(kind="opened", where=tracker.where)
        if state in ("done", "given up") or inbox.late:
            return state
        if state != "following":
            inbox.wait(follower.wait(ending=finish is not None))
        elif finish is None:
            inbox.wait(0)
        if finish is None and inbox.ended:
            finish = inbox.finish or description.ending(run.run_dir, run.attempt)


class Inbox:
    """What the training process says. Its end, or the end of that process, ends the run for us.

    From then on there are `flush_timeout` seconds left; a call that hangs longer ends with the process.
    """

    def __init__(self) -> None:
        self._flush_timeout, self._parent = 0.0, os.getppid()
        self._buffer = b""  # not sys.stdin, whose own buffer `select` does not see
        self._deadline: float | None = None
        self.finish: Finish | None = None

    @property
    def ended(self) -> bool:
        """Whether the run has."""
        return self._deadline is not None

    @property
    def late(self) -> bool:
        """Whether the time for the rest is over."""
        return self._deadline is not None and monotonic() >= self._deadline

    def settings(self) -> dict[str, Any] | None:
        """Wait for the first line; None where the run ends before it."""
        message = self._until_said()
        if message is not None:
            self._flush_timeout = message["flush_timeout"]
        return message

    def begins(self) -> bool:
        """Wait for `begin`; False where the run ends before it."""
        return self._until_said() is not None

    def _until_said(self) -> dict[str, Any] | None:
        while not self.ended:
            message = self.wait(3600.0)
            if message is not None:
                return message
        return None

    def wait(self, seconds: float) -> dict[str, Any] | None:
        """Wait for a line, `seconds` at most. Returns it, unless it is the run's end or there was none."""
        if self.ended:
            if seconds > 0:
                threading.Event().wait(min(seconds, max(0.0, (self._deadline or 0.0) - monotonic())))
            return None
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([0], [], [], min(seconds, 1.0))
            read = os.read(0, 1 << 16) if readable else b""
            # A worker of a loader, forked, may hold the pipe open for a while longer than the training process lives.
            if not read and (readable or os.getppid() != self._parent):
                self._ends(None)
                return None
            self._buffer += read
            seconds -= 1.0
            if not readable and seconds <= 0:
                return None
        line, _, self._buffer = self._buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        if "finish" in message:
            self._ends(Finish(**message["finish"]))
            return None
        return message

    def _ends(self, finish: Finish | None) -> None:
        self.finish = finish
        self._deadline = monotonic() + self._flush_timeout
        watch = threading.Timer(self._flush_timeout + MARGIN, os._exit, [LEFT])
        watch.daemon = True
        watch.start()


@dataclass
class _Tell:
    """What is said to the training process, which may be gone."""

    out: IO[str]

    def say(self, **message: Any) -> None:
        """One line."""
        try:
            self.out.write(json.dumps(message) + "\n")
            self.out.flush()
        except OSError:
            pass

    def trouble(self, trouble: Trouble | None) -> None:
        """Something does not work, or (None) works again."""
        if trouble is None:
            self.say(kind="well")
        else:
            self.say(kind="trouble", text=trouble.text, final=trouble.final)


def _private_stdout() -> IO[str]:
    """The pipe to the training process; what libraries print goes to stderr instead."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return pipe


def _log_to_stderr(tell: _Tell) -> None:
    """Everything goes to the follower's own file; what our own modules warn of is said in the run's log too."""
    logging.basicConfig(level=logging.INFO, format="[%(asctime)s][%(name)s][%(levelname)s] %(message)s")
    logging.getLogger("hydraloop").addHandler(_Remarks(tell))


class _Remarks(logging.Handler):
    def __init__(self, tell: _Tell) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell.say(kind="remark", text=record.getMessage())
