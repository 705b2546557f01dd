"""Sends runs to trackers: once, as `sync` does, or until the owner of this process ends (`sync --follow`).

Each record is sent once: sending resumes at the cursor. `sync --follow` serves each tracker of a run by a thread, so
that a call that hangs delays no other. `start_sender.py` starts that process. Imports no torch.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import psutil
from filelock import Timeout

from hydraloop.files import atomic, lock
from hydraloop.files.console import log_to_stderr
from hydraloop.files.run_directory import SWEEP_FILE
from hydraloop.files.secrets import MASK, remember
from hydraloop.files.terminal import write_utf8
from hydraloop.importing import uncollected
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import Cursor, is_complete, lock_of, path_of, run_dirs
from hydraloop.tracking.follower import Follower, described
from hydraloop.tracking.start_sender import HANGS, MARGIN
from hydraloop.tracking.tracker import OWN, Finish, Run, Tracker, load_tracker

log = logging.getLogger(__name__)

_NICE = 5
"""Lower priority than training, because importing libraries takes seconds of CPU time. Not lower still: at the end of
the run, training waits for this process."""
_POLL = 0.5
"""Seconds between two checks of the owner and of the jobs of a sweep."""
_LOCK_TIMEOUT = 86_400.0
"""Seconds to wait for another sender of the same run: it is ended with its owner."""
SYNC = "_sync"
"""Option that `sync` adds to a tracker's: it may take longer than `flush_timeout`."""
MEASURES = "_measures"
"""Option of a tracker: it may measure the machine, on which the run trains."""
_MOST_FAILURES = 3
"""Failures in a row, without progress, after which `sync` gives a tracker up. The user can repeat the command."""
_BUSY_TIMEOUT = 20.0
"""Seconds without progress after which a service that is there but refuses is given up by `sync`."""


@dataclass(frozen=True, slots=True)
class Access:
    """The secrets of trackers, and where trackers may be."""

    hidden: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Values of options that are masked in files, by the name of the hook."""
    folders: Sequence[str] = ()
    """Folders that may contain trackers."""
    packages: Sequence[str] = ()
    """Packages that may contain trackers."""


class SendOnce:
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
        hopeless = follower.failing >= _BUSY_TIMEOUT if follower.is_busy else follower.failures >= _MOST_FAILURES
        return "the service asks to try later" if hopeless else None

    def wait(self, seconds: float) -> None:
        """Wait before the next try."""
        time.sleep(min(seconds, _BUSY_TIMEOUT))


def send(run_dir: Path, name: str, access: Access, until: SendOnce) -> str | None:
    """Send a run, and how it ended, to one tracker. Does not raise. Returns why it is not everything, else None."""
    try:
        with lock_of(run_dir, name).acquire(timeout=until.lock_timeout):
            return _send(run_dir, name, access, until)
    except Timeout:
        return "the run is still sending its records"
    except Exception as error:
        log.debug("cannot be sent", exc_info=error)
        problem = described(error)
        _write_trouble(run_dir, name, Cursor.load(run_dir, name) or Cursor(""), problem)
        return problem


def _send(run_dir: Path, name: str, access: Access, until: SendOnce) -> str | None:
    run = run_description.read(run_dir)
    if run is None or name not in run.trackers:
        raise ValueError("its description in tracking/ is missing")
    atomic.remove_unfinished(path_of(run_dir, name))
    kind = run.trackers[name]["kind"]
    options, tracker_class = _options(name, kind, run.trackers[name]["options"], access), _loaded(kind, access)
    cursor = Cursor.load(run_dir, name)
    if cursor is None or cursor.kind != kind:
        cursor = Cursor(kind)
    cursor.trouble, cursor.remarks = None, []
    remarks = _Remarks(cursor)
    logging.getLogger("hydraloop").addHandler(remarks)
    tracker = tracker_class({**options, **until.added}, run, cursor.memory)
    try:
        problem = _drain(tracker, cursor, name, until)
    finally:
        logging.getLogger("hydraloop").removeHandler(remarks)
        tracker.close()
    if not run_description.is_described(run_dir, run.attempt.number + 1):
        return problem
    return _send(run_dir, name, access, until)  # a resumed run


def _options(name: str, kind: str, stored: Mapping[str, Any], access: Access) -> dict[str, Any]:
    """Return the options of a tracker, with their secrets.

    Raises:
        ValueError: an option has a secret that is not known.
    """
    hidden = access.hidden.get(name, {})
    options = {key: hidden.get(key, value) if MASK in str(value) else value for key, value in stored.items()}
    missing = [f"hooks.{name}.{option}" for option, value in options.items() if MASK in str(value)]
    if missing and kind not in OWN.values():  # hydraloop's trackers read their secrets from the environment
        raise ValueError(f"{missing[0]} is a secret, which is not stored: let the tracker read it from the environment")
    remember(options)
    return options


def _loaded(kind: str, access: Access) -> type[Tracker]:
    """Return the class of a tracker.

    Raises:
        ValueError: the class is not permitted.
        Exception: raised while it is imported.
    """
    try:
        return load_tracker(kind, folders=access.folders, packages=access.packages)
    except ValueError as error:
        if access.folders:
            raise
        raise ValueError(f"{error}; the project's script sends it: python train.py sync <folder>") from error


def _drain(tracker: Tracker, cursor: Cursor, name: str, until: SendOnce) -> str | None:
    """Send until nothing more is to be sent. Return why the tracker does not have everything; None if it has."""
    run = tracker.run

    def report(trouble: str | None) -> None:
        _write_trouble(run.run_dir, name, cursor, trouble)

    follower = Follower(tracker, cursor, run.run_dir, name, report)
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


def _write_trouble(run_dir: Path, name: str, cursor: Cursor, trouble: str | None) -> None:
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


# `sync --follow`. ----------------------------------------------------------------------------------------------------


class _Owner:
    """The process that has started this one, and what it says.

    Its end is its end as the parent of this process: a worker of a loader may hold the pipe open.
    """

    def __init__(self, said: IO[bytes], pid: int) -> None:
        self._pid = pid
        self._changed = threading.Condition()
        self._over: float | None = None
        self.finish: Finish | None = None
        """How the run has ended, if that is not in its directory."""
        self.flush_timeout = 0.0
        """Seconds to send the rest, if the owner has said so."""
        self.jobs: dict[Path, bool] = {}
        """Directories of jobs that were started, and whether the job runs."""
        threading.Thread(target=self._listen, args=[said], daemon=True).start()

    @property
    def seconds_over(self) -> float:
        """Seconds since the run or sweep, or its owner, has ended; -1 if it has not."""
        with self._changed:
            if self._over is None and os.getppid() != self._pid:
                self._over = time.monotonic()
            return -1.0 if self._over is None else time.monotonic() - self._over

    def wait(self, seconds: float) -> None:
        """Wait, at most until the owner says something."""
        with self._changed:
            self._changed.wait(min(seconds, _POLL))

    def _listen(self, said: IO[bytes]) -> None:
        for line in said:
            message = json.loads(line)
            with self._changed:
                if "end" in message:
                    self.flush_timeout, self._over = message["end"], time.monotonic()
                    self.finish = Finish(**message["finish"]) if message["finish"] else None
                else:
                    ((what, job),) = message.items()
                    self.jobs[Path(job)] = what == "started"
                self._changed.notify_all()


class _SendUntilEnd(SendOnce):
    """Sends until a run has ended, and then for `flush_timeout` after the end of the owner at most."""

    lock_timeout = _LOCK_TIMEOUT

    def __init__(self, owner: _Owner, flush_timeout: float, *, is_job: bool) -> None:
        self._owner, self._flush_timeout, self._is_job = owner, flush_timeout, is_job
        self.added = {SYNC: False, MEASURES: not is_job}

    def finish(self, run: Run) -> Finish | None:
        if self._owner.finish is not None:
            return self._owner.finish
        if not self._is_job and self._owner.seconds_over < 0:
            return None
        return super().finish(run)

    def problem(self, follower: Follower, state: str) -> str | None:
        return "its time is over" if self._owner.seconds_over >= self._flush_timeout else None

    def wait(self, seconds: float) -> None:
        self._owner.wait(seconds)


class _SendRest(SendOnce):
    """Sends the rest of a job that does not run. The sender of an earlier controller may still end, or be killed."""

    lock_timeout = _LOCK_TIMEOUT


class _SenderThreads:
    """The threads that send."""

    def __init__(self, access: Access, owner: _Owner, *, is_sweep: bool) -> None:
        self._access, self._owner, self._is_sweep = access, owner, is_sweep
        self._threads: dict[tuple[Path, str], threading.Thread] = {}
        self._tried: set[tuple[Path, str, int]] = set()
        self._flush_timeout = 0.0

    def start(self, run_dir: Path) -> bool:
        """Start a thread for each tracker that does not have everything of a run. Return whether a thread sends."""
        number, trackers = run_description.trackers_of(run_dir)
        new = [name for name in trackers if not ((run_dir, name, number) in self._tried or self._sends(run_dir, name))]
        if self._is_sweep:
            new = [name for name in new if not is_complete(run_dir, name, number)]
        else:  # without trackers whose library is not installed
            new = [name for name in new if name in self._access.hidden]
        for name in new if not self._threads else ():  # no thread sends: importing a library changes the process
            with suppress(Exception), uncollected():  # the thread reports what fails
                _loaded(trackers[name]["kind"], self._access).preload()
        for name in new:
            self._tried.add((run_dir, name, number))
            flush_timeout = trackers[name]["options"]["flush_timeout"]
            self._flush_timeout = max(self._flush_timeout, flush_timeout)
            until = _SendUntilEnd(self._owner, flush_timeout, is_job=self._is_sweep)
            thread = threading.Thread(target=send, args=[run_dir, name, self._access, until], daemon=True)
            self._threads[run_dir, name] = thread
            thread.start()
        return any(self._sends(run_dir, name) for name in trackers)

    def _sends(self, run_dir: Path, name: str) -> bool:
        thread = self._threads.get((run_dir, name))
        return thread is not None and thread.is_alive()

    @property
    def are_alive(self) -> bool:
        """Whether one of them sends."""
        return any(thread.is_alive() for thread in self._threads.values())

    @property
    def are_late(self) -> bool:
        """Whether the time to send the rest is over, and a little more."""
        return self._owner.seconds_over >= max(self._flush_timeout, self._owner.flush_timeout) + MARGIN


def follow(folder: Path) -> None:
    """Send a run or the jobs of a sweep, and exit."""
    os.nice(_NICE)
    write_utf8()
    log_to_stderr()
    said = sys.stdin.buffer
    first = json.loads(said.readline() or "{}")
    code = 0
    if first:
        remember(first["options"])
        access = Access(hidden=first["options"], folders=first["folders"], packages=first["packages"])
        is_sweep = (folder / SWEEP_FILE).exists()
        owner = _Owner(said, first["owner"])
        code = _follow_sweep(folder, access, owner) if is_sweep else _follow_run(folder, access, owner)
    with suppress(psutil.Error):
        for process in psutil.Process().children(recursive=True):  # wandb-core, which may hang
            with suppress(psutil.Error):
                process.kill()
    os._exit(code)


def _follow_run(run_dir: Path, access: Access, owner: _Owner) -> int:
    threads = _SenderThreads(access, owner, is_sweep=False)
    threads.start(run_dir)
    while threads.are_alive:
        owner.wait(_POLL / 5)
        if threads.are_late:
            return HANGS
    return 0


def _follow_sweep(sweep: Path, access: Access, owner: _Owner) -> int:
    """Send the jobs that run; at first also the rest of the others, which save after their controller is killed."""
    threads = _SenderThreads(access, owner, is_sweep=True)
    rest = threading.Thread(target=_send_rest, args=[sweep, access, owner], daemon=True)
    rest.start()
    while not threads.are_late:
        is_over = owner.seconds_over >= 0
        for job, runs in list(owner.jobs.items()):
            if not threads.start(job) and not runs:
                owner.jobs.pop(job, None)
        if is_over and not (threads.are_alive or rest.is_alive()):
            return 0
        owner.wait(_POLL)
    return HANGS


def _send_rest(sweep: Path, access: Access, owner: _Owner) -> None:
    """Send the rest of jobs that do not run."""
    for run_dir in run_dirs(sweep):
        number, trackers = run_description.trackers_of(run_dir)
        if run_dir not in owner.jobs and lock.holder(run_dir) is None:
            for name in trackers:
                if not is_complete(run_dir, name, number):
                    send(run_dir, name, access, _SendRest())
