"""The process of a follower, and what it exchanges with the training process: lines of JSON.

In: the hook's options; `begin` when the run is described and its log is cut; `finish` when the run has ended. Out: what
is to be logged in the terminal. The end of the input means that the training process has exited; the follower then
sends the rest and closes the run within the same time limit.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import IO, Any

from filelock import Timeout

from hydraloop.safety.secrets import name_secrets, remember
from hydraloop.tracking import description
from hydraloop.tracking.follower.cursor import Cursor
from hydraloop.tracking.follower.follower import Follower, Trouble, described
from hydraloop.tracking.follower.inbox import LEFT, Inbox
from hydraloop.tracking.follower.locks import BUSY, PATIENCE, end_orphans, lock_of
from hydraloop.tracking.follower.masked_logging import log_to_stderr
from hydraloop.tracking.kinds import load_tracker
from hydraloop.tracking.tracker import Finish, Run, Tracker

log = logging.getLogger(__name__)

_NICE = 5
"""Lower priority than training, because importing libraries takes seconds of CPU time. Not lower still: at the end of
the run, training waits for this process."""
_LOOK = 1.0
"""Seconds between two tries to get the lock."""


def main(run_dir: Path, name: str) -> int:
    """Follow a run until it has ended. Returns the exit code: 0 if everything was sent, else `LEFT`."""
    os.nice(_NICE)
    tell = _Tell(_private_stdout())
    log_to_stderr()
    logging.getLogger("hydraloop").addHandler(_Remarks(tell))
    inbox = Inbox()
    given = inbox.settings()
    if given is None:
        return 0
    name_secrets(given.get("secrets", ()))
    remember(given["options"])
    kind = load_tracker(given["kind"], folders=given["folders"], packages=given["trusted"])
    with suppress(Exception):  # `open` reports it
        kind.preload()
    if not inbox.begins():
        return 0
    lock = _locked(run_dir, name, inbox, tell)
    if lock is None:
        return LEFT
    with lock:
        run = description.read(run_dir)
        assert run is not None, "the training process describes the run before it says begin"
        cursor = _cursor(run_dir, name, given)
        tracker = kind(given["options"], run, cursor.memory)
        try:
            state = _follow(Follower(tracker, cursor, run_dir, name, tell.trouble), inbox, run, tell, tracker)
        finally:
            tracker.close()
    return 0 if state == "done" else LEFT


def _locked(run_dir: Path, name: str, inbox: Inbox, tell: _Tell) -> AbstractContextManager[object] | None:
    """Wait for the lock, which a `sync.py` may hold. Returns None if the run ends before it is free."""
    lock, told, patient = lock_of(run_dir, name), False, monotonic() + PATIENCE
    while True:
        try:
            free = lock.acquire(timeout=0)
        except (Timeout, OSError) as error:
            if monotonic() >= patient and not told:
                why = f"{BUSY}; waiting for it" if isinstance(error, Timeout) else described(error)
                tell.trouble(Trouble(why, final=False))
                told = True
        else:
            if told:
                tell.trouble(None)
            return free
        if inbox.late:
            return None
        inbox.wait(_LOOK)
        if told and not inbox.ended:
            end_orphans(run_dir, name, os.getppid())


def _cursor(run_dir: Path, name: str, given: Mapping[str, Any]) -> Cursor:
    """Return the cursor of an earlier process if it is of the same tracker, else a new one."""
    cursor = Cursor.load(run_dir, name)
    if cursor is not None and cursor.kind != given["kind"]:
        log.warning("the tracker was %s and is %s now: all records are sent again", cursor.kind, given["kind"])
        cursor = None
    cursor = cursor or Cursor(given["kind"], given["masked"])
    cursor.options = given["masked"]
    with suppress(OSError):  # the follower's own saves report a full disk
        cursor.save(run_dir, name)  # for `sync.py`, if this process is killed
    return cursor


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
        if finish is None and inbox.ended:
            finish = inbox.finish or description.ending(run.run_dir, run.attempt)


@dataclass
class _Tell:
    """Sends messages to the training process, which may have exited."""

    out: IO[str]

    def say(self, **message: Any) -> None:
        """Send one message."""
        try:
            self.out.write(json.dumps(message) + "\n")
            self.out.flush()
        except OSError:
            pass

    def trouble(self, trouble: Trouble | None) -> None:
        """Report that something does not work, or (None) that it works again."""
        if trouble is None:
            self.say(kind="well")
        else:
            self.say(kind="trouble", text=trouble.text, final=trouble.final)


def _private_stdout() -> IO[str]:
    """Return the pipe to the training process. Output of libraries to stdout goes to stderr from now on."""
    pipe = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return pipe


class _Remarks(logging.Handler):
    """Forwards warnings of hydraloop's modules to the run's log."""

    def __init__(self, tell: _Tell) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self._tell.say(kind="remark", text=record.getMessage())
