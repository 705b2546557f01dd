"""What follows from the failure of a job: `next_attempt` starts it again, `Builds` ends a sweep that cannot train."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path

from hydraloop.files.metrics_log import FILENAME as RECORDS
from hydraloop.files.result import FILENAME, Result
from hydraloop.sweeps import job_states
from hydraloop.sweeps.executors.executor import Cause, Ended
from hydraloop.sweeps.job_states import JobState

_MOST_LOSSES = 10
"""Times that a lost job starts again without a retry. After that, the job may be the cause."""


def next_attempt(state: JobState, ended: Ended, iterations_before: int, max_retries: int) -> JobState | None:
    """Return the state of a job that starts again, with the retry counted; None if it does not.

    The state is not over, so that a later controller starts the job if this one cannot. A lost job and a preempted one
    that has made progress start again without a retry.

    Args:
        state: after the attempt.
        ended: how its process has ended.
        iterations_before: completed iterations before the attempt. A preempted attempt without progress counts as a
            retry: otherwise it might repeat forever.
        max_retries: `sweep.max_retries`.
    """
    if state.state not in ("failed", "interrupted"):
        return None
    if state.has_diverged or ended.cause is Cause.CANCELLED:
        return None
    if ended.cause is Cause.LOST and state.state == "interrupted" and state.losses < _MOST_LOSSES:
        return replace(state, losses=state.losses + 1)
    # A signal is a preemption only if the scheduler has sent it. A person or a mistake may have sent another one.
    by_signal = state.preempted_by in signal.Signals.__members__
    is_preempted = state.preempted_by is not None and (ended.cause is Cause.SCHEDULER or not by_signal)
    if is_preempted and state.iterations > iterations_before:
        return state
    if state.retries >= max_retries:
        return None
    return replace(job_states.interrupted(state), retries=state.retries + 1)


@dataclass
class Builds:
    """Tells whether the first jobs have failed alike while they were built: the mistake may be one of all jobs."""

    run_dirs: set[Path] = field(default_factory=set)
    """Of all jobs that were started."""
    failed: dict[int, JobState] = field(default_factory=dict)
    """The jobs that could not be built and are not retried, by number."""

    def add_end(self, state: JobState, run_dir: Path) -> None:
        """Add a job that is not retried, if it could not be built. A crash without an error is not added."""
        if state.state == "failed" and (run_dir / FILENAME).exists() and not was_built(run_dir):
            self.failed[state.number] = state

    @property
    def all_fail(self) -> bool:
        """Whether two jobs have failed with the same error, and no job was built. A running job may still be built."""
        errors = Counter(state.error for state in self.failed.values())
        return max(errors.values(), default=0) > 1 and not any(map(was_built, self.run_dirs))


def was_built(run_dir: Path) -> bool:
    """Return whether the engine of a job was built. Only the engine writes progress into `result.json`, and records.

    An engine that refuses an option of the sweep counts as not built, because it would refuse the option in each job.
    """
    result = Result.read(run_dir)
    if result is not None and (result.error or "").startswith("sweep."):
        return False
    return (run_dir / RECORDS).exists() or (result is not None and bool(result.progress))
