"""`sync --follow`: the process that sends a run, or the jobs of a sweep, until its owner ends. Imports no torch.

Each tracker of a run is served by a thread, so that a call that hangs delays no other. `sender.py` starts the process.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

import psutil

from hydraloop.run_files import lock
from hydraloop.run_files.output import write_utf8
from hydraloop.run_files.uncollected import uncollected
from hydraloop.safety.secret_names import name_secrets
from hydraloop.safety.secrets import remember
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import run_dirs
from hydraloop.tracking.follower import Follower
from hydraloop.tracking.masked_output import log_to_stderr
from hydraloop.tracking.sender import HANGS, LEFT, MARGIN
from hydraloop.tracking.sending import MEASURES, SYNC, How, Once, is_complete, send
from hydraloop.tracking.tracker import Finish, Run, load_tracker

log = logging.getLogger(__name__)

_NICE = 5
"""Lower priority than training, because importing libraries takes seconds of CPU time. Not lower still: at the end of
the run, training waits for this process."""
_LOOK = 0.5
"""Seconds between two looks at the owner and at the jobs of a sweep."""
_LOCK = 86_400.0
"""Seconds to wait for another sender of the same run: it is ended with its owner."""


class _Owner:
    """The process that has started this one, and what it says.

    Its end is its end as the parent of this process: a worker of a loader may hold the pipe open.
    """

    def __init__(self, said: IO[bytes], pid: int) -> None:
        self._pid = pid
        self._changed = threading.Condition()
        self._over: float | None = None
        self.end: Mapping[str, Any] | None = None
        """How the run has ended; empty for a sweep."""
        self.jobs: dict[Path, bool] = {}
        """Directories of jobs that were begun, and whether the job runs."""
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
            self._changed.wait(min(seconds, _LOOK))

    def _listen(self, said: IO[bytes]) -> None:
        for line in said:
            message = json.loads(line)
            with self._changed:
                if "end" in message:
                    self.end, self._over = message["end"], time.monotonic()
                else:
                    ((what, job),) = message.items()
                    self.jobs[Path(job)] = what == "begun"
                self._changed.notify_all()


class _Following(Once):
    """Sends until a run has ended, and then for `flush_timeout` after the end of the owner at most."""

    lock_timeout = _LOCK

    def __init__(self, owner: _Owner, flush_timeout: float, *, is_job: bool) -> None:
        self._owner, self._flush_timeout, self._is_job = owner, flush_timeout, is_job
        self.added = {SYNC: False, MEASURES: not is_job}

    def finish(self, run: Run) -> Finish | None:
        if self._owner.end:
            return Finish(**self._owner.end)
        if not self._is_job and self._owner.seconds_over < 0:
            return None
        return super().finish(run)

    def problem(self, follower: Follower, state: str) -> str | None:
        return "its time is over" if self._owner.seconds_over >= self._flush_timeout else None

    def wait(self, seconds: float) -> None:
        self._owner.wait(seconds)


class _Threads:
    """The threads that send."""

    def __init__(self, how: How, owner: _Owner, *, is_sweep: bool) -> None:
        self._how, self._owner, self._is_sweep = how, owner, is_sweep
        self._threads: dict[tuple[Path, str], threading.Thread] = {}
        self._tried: set[tuple[Path, str, int]] = set()
        self.flush_timeout = 0.0
        """The longest one, in seconds."""
        self.is_complete = True
        """Whether everything was sent."""

    def look(self, run_dir: Path) -> bool:
        """Start a thread for each tracker of a run that lacks something. Returns whether one lacks something."""
        number, trackers = run_description.trackers_of(run_dir)
        due = [name for name in trackers if not ((run_dir, name, number) in self._tried or self._sends(run_dir, name))]
        if self._is_sweep:
            due = [name for name in due if not is_complete(run_dir, name, number)]
        else:  # without those of which the library is not installed
            due = [name for name in due if name in self._how.hidden]
        if not self._threads:
            for name in due:
                self._preload(trackers[name]["kind"])
        for name in due:
            self._tried.add((run_dir, name, number))
            flush_timeout = trackers[name]["options"]["flush_timeout"]
            self.flush_timeout = max(self.flush_timeout, flush_timeout)
            until = _Following(self._owner, flush_timeout, is_job=self._is_sweep)
            thread = threading.Thread(target=self._send, args=[run_dir, name, until], daemon=True)
            self._threads[run_dir, name] = thread
            thread.start()
        return any(self._sends(run_dir, name) for name in trackers)

    def _sends(self, run_dir: Path, name: str) -> bool:
        thread = self._threads.get((run_dir, name))
        return thread is not None and thread.is_alive()

    def _preload(self, kind: str) -> None:
        """Import the library of a tracker. Only while no thread sends: it changes the process."""
        with suppress(Exception), uncollected():  # the thread reports what fails
            load_tracker(kind, folders=self._how.folders, packages=self._how.trusted).preload()

    def _send(self, run_dir: Path, name: str, until: Once) -> None:
        problem = send(run_dir, name, self._how, until).problem
        if problem is not None:
            self.is_complete = False
            log.info("%s: %s: %s", run_dir, name, problem)

    @property
    def are_alive(self) -> bool:
        """Whether one of them sends."""
        return any(thread.is_alive() for thread in self._threads.values())


def follow(folder: Path) -> None:
    """Send a run or the jobs of a sweep, and exit."""
    os.nice(_NICE)
    write_utf8()
    log_to_stderr()
    said = os.fdopen(os.dup(0), "rb")  # processes that a library starts inherit stdin, not the copy
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    first = json.loads(said.readline() or "{}")
    code = LEFT
    if first:
        name_secrets(first["secrets"])
        remember(first["options"])
        how = How(hidden=first["options"], folders=first["folders"], trusted=first["packages"])
        is_sweep = (folder / run_description.SWEEP_FILE).exists()
        owner = _Owner(said, first["owner"])
        code = _follow_sweep(folder, how, owner) if is_sweep else _follow_run(folder, how, owner)
    with suppress(psutil.Error):
        for process in psutil.Process().children(recursive=True):  # wandb-core, which may hang
            with suppress(psutil.Error):
                process.kill()
    os._exit(code)


def _follow_run(run_dir: Path, how: How, owner: _Owner) -> int:
    threads = _Threads(how, owner, is_sweep=False)
    threads.look(run_dir)
    while threads.are_alive:
        owner.wait(_LOOK / 5)
        if owner.seconds_over >= threads.flush_timeout + MARGIN:
            return HANGS
    return 0 if threads.is_complete else LEFT


def _follow_sweep(sweep: Path, how: How, owner: _Owner) -> int:
    """Send the jobs that run, and at the beginning what is left of the others: jobs save after a killed controller."""
    threads = _Threads(how, owner, is_sweep=True)
    rest = threading.Thread(target=_send_rest, args=[sweep, how, owner, threads], daemon=True)
    rest.start()
    while True:
        is_over = owner.seconds_over >= 0
        for job, runs in list(owner.jobs.items()):
            if not threads.look(job) and not runs:
                owner.jobs.pop(job, None)
        if is_over and not (threads.are_alive or rest.is_alive()):
            return 0
        owner.wait(_LOOK)
        if owner.seconds_over >= threads.flush_timeout + MARGIN:
            return HANGS


def _send_rest(sweep: Path, how: How, owner: _Owner, threads: _Threads) -> None:
    """Send what is left of jobs that do not run."""
    for run_dir in run_dirs(sweep):
        number, trackers = run_description.trackers_of(run_dir)
        for name, tracker in trackers.items():
            if run_dir in owner.jobs or lock.holder(run_dir) is not None or is_complete(run_dir, name, number):
                continue
            threads.flush_timeout = max(threads.flush_timeout, tracker["options"]["flush_timeout"])
            if owner.seconds_over < threads.flush_timeout:
                send(run_dir, name, how, Once())
