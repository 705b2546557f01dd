"""Attempts: what a controller writes of each start of a job, and whether a job that has ended starts again."""

from __future__ import annotations

import signal
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from hydraloop.files.record_log import FILENAME as RECORDS
from hydraloop.files.result import digest
from hydraloop.files.secrets import mask_overrides
from hydraloop.launch.failure import REQUEUE
from hydraloop.sweeps import job_states
from hydraloop.sweeps.executors.executor import UNUSABLE, Ended
from hydraloop.sweeps.job_states import Job, JobState
from hydraloop.sweeps.sweep_directory import SweepDirectory

_LOSSES = 10
"""How often a job whose machine was lost starts again without a retry. More often, the job may be the cause."""


@dataclass
class Retries:
    """Counts the retries of each job. A job that was preempted or lost needs no retry."""

    most: int
    """Of each job."""
    _used: Counter[int] = field(default_factory=Counter)
    _losses: Counter[int] = field(default_factory=Counter)
    """How often the machine of each job was lost."""

    def allow(self, state: JobState, iterations: int, ended: Ended) -> bool:
        """Return whether a job starts again, and count it.

        Args:
            state: after the attempt.
            iterations: of the job before the attempt. An attempt without progress is a retry: it might repeat forever.
            ended: how its process has ended.
        """
        if state.state not in ("failed", "interrupted") or state.has_diverged or ended.is_cancelled:
            return False
        if ended.is_lost and state.state == "interrupted" and self._losses[state.number] < _LOSSES:
            self._losses[state.number] += 1
            return True
        cause = state.preempted_by
        is_preempted = cause is not None and (ended.by_scheduler or cause not in signal.Signals.__members__)
        if is_preempted and state.iterations > iterations:
            return True
        self._used[state.number] += 1
        return self._used[state.number] <= self.most


_ENDINGS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
"""Signals that users, schedulers and the kernel end a process with. Others mean a mistake in the program."""


def begin(directory: SweepDirectory, job: Job, before: JobState, run_dir: str) -> JobState:
    """Write that a job runs, before its process starts. Return that state.

    Args:
        before: its state.
        run_dir: relative to the directory of the sweep.

    Raises:
        OSError: the state cannot be written.
    """
    begun = JobState(
        number=job.number,
        state="running",
        overrides=tuple(mask_overrides(job.lines)),
        attempts=before.attempts + 1,
        directory=run_dir,
        began=time.time(),
        seconds=before.seconds,
        iterations=before.iterations,
        earlier_result=digest(directory.path / run_dir),
        params=before.params,
        notes=before.notes,
        rungs=before.rungs,
    )
    directory.write(begun, flush=begun.params is not None)  # no other file has the values of a trial
    return begun


def lost(directory: SweepDirectory, begun: JobState, code: int | None) -> JobState:
    """Return the state of a job whose process has ended without a result.

    Args:
        code: its exit code, negative for a signal; None if unknown.
    """
    ended = _last_seen(directory, begun) if code is None else time.time()
    return job_states.end(_lost(begun, code), ended, max(0.0, ended - (begun.began or ended)))


def prune(state: JobState, reason: str) -> JobState:
    """Return the state of a job that does not run, pruned unless it is over."""
    can_be = state.state in ("queued", "paused", "interrupted")
    return replace(state, state="pruned", reason=reason) if can_be else state


def _lost(state: JobState, code: int | None) -> JobState:
    """Return the state and the reason by the exit code."""
    if code is None:
        return replace(state, state="interrupted", reason="its process has ended without a result")
    if code == UNUSABLE:
        return replace(state, state="interrupted", reason=f"its directory could not be used; see {job_states.LOG}")
    if code == REQUEUE:
        return replace(state, state="interrupted", reason="it was ended before it could begin")
    number = -code if code < 0 else code - 128
    if number in _ENDINGS:
        memory = " (out of memory?)" if number == signal.SIGKILL else ""
        return replace(state, state="interrupted", reason=f"killed by {signal.Signals(number).name}{memory}")
    how = f"crashed ({signal.Signals(-code).name})" if code < 0 else f"ended with exit code {code} and no result"
    return replace(state, state="failed", error=f"its process {how}; see {job_states.LOG}")


def _last_seen(directory: SweepDirectory, state: JobState) -> float:
    """Return when the process of a job has last written to its log or its records."""
    files: tuple[Path, ...] = (directory.folder(state.number) / job_states.LOG, directory.run_dir(state) / RECORDS)
    return max((path.stat().st_mtime for path in files if path.exists()), default=time.time())
