"""The queue of a sweep's jobs: a process claims a job, and its end is written once.

The lock of the job's folder is the claim on the job. Only a process that has the lock writes the job's state:

- the process of the job, which keeps the lock until it has written how the attempt has ended;
- a process that finds a running job with a free lock, and writes that the job's process was killed;
- a process that prunes a job that does not run.

Therefore each attempt has one process, and each job ends once.
"""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from hydraloop.platforms import signals
from hydraloop.processes.failure import REQUEUE
from hydraloop.run_files import atomic, lock
from hydraloop.run_files.record_log import FILENAME as RECORDS
from hydraloop.run_files.result import digest
from hydraloop.safety.secrets import mask_overrides
from hydraloop.sweeps import states
from hydraloop.sweeps.executors.executor import LEFT, NOT_RECORDED, Request
from hydraloop.sweeps.states import JobState
from hydraloop.sweeps.sweep_directory import SweepDirectory

_ENDINGS = signals("SIGKILL", "SIGTERM", "SIGINT", "SIGHUP")
"""Signals that users, schedulers and the kernel end a process with. Others mean a mistake in the program."""
UNREPORTED = "its process has ended without a result"
"""Why a job was interrupted whose process has ended together with its controller."""


def claim(directory: SweepDirectory, request: Request) -> JobState | None:
    """Write that the job is running, and return that state; None if it has been started since the request.

    The process must have the lock of the job.

    Raises:
        OSError: the state cannot be written.
    """
    before = directory.state(request.number)
    folder = directory.folder(request.number)
    atomic.remove_unfinished(folder / states.FILENAME)
    if before.attempts != request.attempts or before.state not in ("queued", "interrupted", "paused", "failed"):
        return None
    state = JobState(
        number=request.number,
        state="running",
        overrides=tuple(mask_overrides(request.lines)),
        attempts=before.attempts + 1,
        controller=request.controller,
        directory=before.directory,
        host=socket.gethostname(),
        pid=os.getpid(),
        began=time.time(),
        seconds=before.seconds,
        iterations=before.iterations,
        earlier_result=digest(directory.run_dir(before)),
        params=before.params,
        notes=before.notes,
        rungs=before.rungs,
    )
    states.write(folder, state, flush=state.params is not None)  # no other file has the values of a trial
    return state


def end(directory: SweepDirectory, number: int, code: int | None, attempt: int | None = None) -> JobState:
    """Return the state of a job whose process has ended, after writing it if that process could not.

    A job that another process has started again since, or whose ranks are still ending, is `running`.

    Args:
        code: the exit code, negative for a signal; None if unknown.
        attempt: which attempt of this controller has ended with that code. Another controller may have been faster.

    Raises:
        OSError, UserError: the state cannot be written.
    """
    state, folder = directory.state(number), directory.folder(number)
    is_running = state.state == "running"
    is_unclaimed = attempt == state.attempts + 1 and code not in (LEFT, NOT_RECORDED) and state.state != "pruned"
    if not is_running and not is_unclaimed:
        return state
    if is_running and (attempt, directory.controller) != (state.attempts, state.controller):
        code = None  # of another process
    held = lock.RunLock(folder, key="sweep")
    ended = _last_seen(folder) if code is None else time.time()
    if held.try_acquire() is not None:
        return state
    try:
        current = directory.state(number)
        if (current.state, current.attempts) != (state.state, state.attempts):  # it was started or ended since
            return current
        if is_running:
            told = states.ended_from_result(state, directory.run_dir(state))
            state = told or states.end(_lost(state, code), ended)
        else:  # its process has ended before it could write that it runs
            lost = _lost(replace(state, attempts=state.attempts + 1, controller=directory.controller), code)
            state = replace(lost, ended=ended)
            (folder / states.REQUEST).unlink(missing_ok=True)
        states.write(folder, state, flush=True)
    finally:
        held.release()
    return state


def prune(directory: SweepDirectory, number: int, reason: str) -> JobState | None:
    """Write that a queued, paused or interrupted job is pruned. Return its state; any other state stays as it is.

    None if another process has the lock of the job. Raises: as `change`.
    """

    def pruned(state: JobState) -> JobState | None:
        can_be = state.state in ("queued", "paused", "interrupted")
        return replace(state, state="pruned", reason=reason) if can_be else None

    return change(directory, number, pruned)


def change(directory: SweepDirectory, number: int, changed: Callable[[JobState], JobState | None]) -> JobState | None:
    """Change the state of a job that does not run, and return it. Waits some seconds for a process that is ending.

    Args:
        changed: returns the new state; None: the state stays as it is.

    Returns:
        None if another process has the lock of the job.

    Raises:
        OSError, UserError: the state cannot be written.
    """
    folder = directory.folder(number)
    folder.mkdir(parents=True, exist_ok=True)
    held = lock.RunLock(folder, key="sweep")
    if held.try_acquire(lock.PATIENCE) is not None:
        return None
    try:
        state = directory.state(number)
        if (new := changed(state)) is not None:
            state = new
            states.write(folder, state, flush=True)
    finally:
        held.release()
    return state


def _lost(state: JobState, code: int | None) -> JobState:
    """Return the state of a job whose process has ended without writing it, by its exit code."""
    if code is None:
        return replace(state, state="interrupted", reason=UNREPORTED)
    if code in (NOT_RECORDED, REQUEUE):
        return replace(state, state="interrupted", reason="its state could not be written")
    number = -code if code < 0 else code - 128
    if number in _ENDINGS:
        memory = " (out of memory?)" if number == signal.SIGKILL else ""
        return replace(state, state="interrupted", reason=f"killed by {signal.Signals(number).name}{memory}")
    how = f"crashed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code} and no result"
    return replace(state, state="failed", error=f"its process {how}; see {states.LOG}")


def _last_seen(folder: Path) -> float:
    """Return when the process of a job has last written to its log or its records."""
    times = [path.stat().st_mtime for path in (folder / states.LOG, folder / RECORDS) if path.exists()]
    return max(times, default=time.time())
