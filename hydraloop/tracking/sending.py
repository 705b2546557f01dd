"""Sends a run to one tracker, for `sync` and for senders. Each record is sent once: sending resumes at the cursor."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import Timeout

from hydraloop.errors import not_installed
from hydraloop.run_files import lock
from hydraloop.run_files.record_log import FILENAME, count
from hydraloop.safety.secret_names import name_secrets
from hydraloop.safety.secrets import MASK, remember
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import Cursor, lock_of
from hydraloop.tracking.follower import Follower, described
from hydraloop.tracking.tracker import OWN, Finish, Run, Tracker, load_tracker

log = logging.getLogger(__name__)

SYNC = "_sync"
"""Option that `sync` adds to a tracker's: it may take longer than `flush_timeout`."""
MEASURES = "_measures"
"""Option of a tracker: it may measure the machine, on which the run trains."""
_TRIES = 3
"""Failures in a row, without progress, after which `sync` gives a tracker up. The user can repeat the command."""
_BUSY = 20.0
"""Seconds without progress after which a service that is there but refuses is given up by `sync`."""


@dataclass(frozen=True, slots=True)
class How:
    """How runs are sent."""

    again: bool = False
    """Whether everything is sent again, to a service that has nothing of the run; only to those in `options` if any."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options that replace those of the run, by the name of the hook."""
    hidden: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values of options that are masked in files, by the name of the hook."""
    folders: Sequence[str] = ()
    """Folders that may contain trackers."""
    trusted: Sequence[str] = ()
    """Packages that may contain trackers."""


@dataclass(slots=True)
class Sent:
    """What was sent to a tracker."""

    cursor: Cursor | None = None
    before: int | None = None
    """Number of records that the service had before; None if it is not known."""
    problem: str | None = None
    """Why it is not everything."""


class Once:
    """Sends what is there, as `sync` does. Subclasses decide otherwise when to stop."""

    added: Mapping[str, Any] = {SYNC: True, MEASURES: False}
    """Options of the tracker."""
    lock_timeout = 0.0
    """Seconds to wait for the sender of the same tracker."""

    def finish(self, run: Run) -> Finish | None:
        """Return how the run ended; None while it is training."""
        found = run_description.ending(run.run_dir, run.attempt)
        if found.status != "killed":
            return found
        if lock.holder(run.run_dir) is not None:
            return None
        return run_description.ending(run.run_dir, run.attempt)  # it may have been written before the lock was released

    def problem(self, follower: Follower, state: str) -> str | None:
        """Return why nothing more is sent; None to go on."""
        if state in ("caught up", "cut"):
            return "the run is still training"
        hopeless = follower.failing >= _BUSY if follower.is_busy else follower.failures >= _TRIES
        return "the service asks to try later" if hopeless else None

    def wait(self, seconds: float) -> None:
        """Wait before the next try."""
        time.sleep(min(seconds, _BUSY))


def send(run_dir: Path, name: str, how: How, until: Once) -> Sent:
    """Send a run, and how it ended, to one tracker. Does not raise."""
    sent = Sent()
    try:
        with lock_of(run_dir, name).acquire(timeout=until.lock_timeout):
            while not _send_attempt(run_dir, name, how, until, sent):
                how = How(options=how.options, hidden=how.hidden, folders=how.folders, trusted=how.trusted)
    except Timeout:
        sent.problem = "the run is still sending its records"
    except Exception as error:
        log.debug("cannot be sent", exc_info=error)
        sent.problem = described(error)
        if sent.cursor is not None:
            _tell(run_dir, name, sent.cursor, sent.problem)
    return sent


def is_complete(run_dir: Path, name: str, attempt: int) -> bool:
    """Return whether a tracker has everything that a run has after the attempt of a number."""
    cursor = Cursor.load(run_dir, name)
    if cursor is None or not cursor.complete or cursor.attempt != attempt:
        return False
    return cursor.index >= count(run_dir / FILENAME)


def _send_attempt(run_dir: Path, name: str, how: How, until: Once, sent: Sent) -> bool:
    """Send a run up to its last attempt that is described now. Returns whether no other one was described since."""
    run = run_description.read(run_dir)
    if run is None or name not in run.trackers:
        raise ValueError("its description in tracking/ is missing")
    name_secrets(run_description.names_of_secrets(run_dir))
    stored = run.trackers[name]
    kind = stored["kind"]
    cursor = Cursor.load(run_dir, name)
    if cursor is not None and cursor.kind != kind:
        log.warning("the tracker was %s and is %s now: all records are sent again", cursor.kind, kind)
        cursor = None
    cursor = sent.cursor = cursor or Cursor(kind)
    cursor.trouble = None
    if cursor.about != run.attempt.number:
        cursor.about, cursor.remarks = run.attempt.number, []
    options = _options(name, kind, stored["options"], how)
    tracker_class = _loaded(kind, how)
    if how.again:
        cursor = sent.cursor = Cursor(kind, memory={"again": True})
    sent.before = cursor.sent if sent.before is None else sent.before
    with suppress(OSError):  # the follower's own saves report a full disk
        cursor.save(run_dir, name)
    remarks = _Remarks(cursor)
    logging.getLogger("hydraloop").addHandler(remarks)
    tracker = tracker_class({**options, **until.added}, run, cursor.memory)
    try:
        sent.problem = _drain(tracker, cursor, name, until)
    finally:
        logging.getLogger("hydraloop").removeHandler(remarks)
        tracker.close()
    return not run_description.is_described(run_dir, run.attempt.number + 1)


def _options(name: str, kind: str, stored: Mapping[str, Any], how: How) -> dict[str, Any]:
    """Return the options of a tracker, with their secrets.

    Raises:
        ValueError: an option is unknown, or has a secret that is not known.
    """
    hidden = how.hidden.get(name, {})
    options = {key: hidden.get(key, value) if MASK in str(value) else value for key, value in stored.items()}
    typed = how.options.get(name, {})
    if unknown := typed.keys() - options.keys():
        raise ValueError(f"hooks.{name}.{min(unknown)}: no such option")
    options |= typed
    lacking = [f"hooks.{name}.{option}" for option, value in options.items() if MASK in str(value)]
    if lacking and kind not in OWN.values():  # those take their secrets from the environment
        raise ValueError(f"{lacking[0]} has a secret, which is not stored: add {lacking[0]}=<value>")
    remember(options)
    return options


def _loaded(kind: str, how: How) -> type[Tracker]:
    """Return the class of a tracker.

    Raises:
        ValueError: the class is not permitted, or its library is not installed.
        Exception: raised while it is imported.
    """
    try:
        return load_tracker(kind, folders=how.folders, packages=how.trusted)
    except ModuleNotFoundError as error:
        if error.name not in OWN:
            raise
        mistake = not_installed(error.name)
        raise ValueError(f"{mistake.problem}: {mistake.remedy}") from None
    except ValueError as error:
        package = kind.partition(".")[0]
        remedy = "start the command in the project's folder" if package in how.trusted else f"add --trusted {package}"
        raise ValueError(f"{error}; if you trust its code, {remedy}") from error


def _drain(tracker: Tracker, cursor: Cursor, name: str, until: Once) -> str | None:
    """Send until nothing more is to be sent. Returns why it is not all that there will be."""
    run = tracker.run
    follower = Follower(tracker, cursor, run.run_dir, name, lambda text: _tell(run.run_dir, name, cursor, text))
    while True:
        finish = until.finish(run)
        state = follower.step(finish)
        if state == "done" or run_description.is_described(run.run_dir, run.attempt.number + 1):
            return None
        if state == "given up":
            return cursor.trouble
        if (problem := until.problem(follower, state)) is not None:
            return cursor.trouble or problem
        if state != "following":
            until.wait(follower.wait(ending=finish is not None))


def _tell(run_dir: Path, name: str, cursor: Cursor, trouble: str | None) -> None:
    """Write what does not work into the cursor, where the hook finds it."""
    log.info("%s: %s", name, trouble or "works again")
    cursor.trouble = trouble
    with suppress(OSError):  # for example a full disk
        cursor.save(run_dir, name)


class _Remarks(logging.Handler):
    """Adds the warnings of the thread that makes it to a cursor."""

    def __init__(self, cursor: Cursor) -> None:
        super().__init__(logging.WARNING)
        self._cursor, self._thread = cursor, threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        """Add the message of a record."""
        if record.thread == self._thread:
            self._cursor.remarks.append(record.getMessage())
