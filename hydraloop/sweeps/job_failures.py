"""What follows from the failure of a job: Retries starts the job again, FailedBuilds ends a sweep that cannot train."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from hydraloop.files.metrics_log import FILENAME as RECORDS
from hydraloop.files.result import FILENAME, Result
from hydraloop.sweeps.executors.executor import Cause, Ended
from hydraloop.sweeps.job_states import JobState

_MOST_LOSSES = 10
"""Times that a job starts again without a retry because its machine was lost. After that, the job may be the cause."""


@dataclass
class Retries:
    """Counts the retries of each job. A preempted job that has made progress, and a lost one, start again for free."""

    most: int
    """`sweep.max_retries`, of each job."""
    _used: Counter[int] = field(default_factory=Counter)
    _losses: Counter[int] = field(default_factory=Counter)
    """How often the machine of each job was lost."""

    def use(self, ended: Ended, state: JobState, iterations_before: int) -> bool:
        """Return whether a job starts again, and count it.

        Args:
            state: after the attempt.
            iterations_before: completed iterations before the attempt. A preempted attempt without progress counts as
                a retry: otherwise it might repeat forever.
        """
        if state.state not in ("failed", "interrupted"):
            return False
        if state.has_diverged or ended.cause is Cause.CANCELLED:
            return False
        if ended.cause is Cause.LOST and state.state == "interrupted" and self._losses[state.number] < _MOST_LOSSES:
            self._losses[state.number] += 1
            return True
        # A signal that was not the scheduler's came from a person or from a mistake.
        by_signal = state.preempted_by in signal.Signals.__members__
        is_preempted = state.preempted_by is not None and (ended.cause is Cause.SCHEDULER or not by_signal)
        if is_preempted and state.iterations > iterations_before:
            return True
        self._used[state.number] += 1
        return self._used[state.number] <= self.most


@dataclass
class FailedBuilds:
    """The jobs that have failed while they were built: the mistake may be one of all jobs."""

    states: dict[int, JobState] = field(default_factory=dict)

    def add(self, state: JobState, run_dir: Path) -> None:
        """Add a job that is not started again, if it could not be built. A crash without an error is not added."""
        if state.state == "failed" and (run_dir / FILENAME).exists() and not was_built(run_dir):
            self.states[state.number] = state

    @property
    def are_alike(self) -> bool:
        """Whether two jobs have failed with the same error."""
        errors = Counter(state.error for state in self.states.values())
        return max(errors.values(), default=0) > 1


def was_built(run_dir: Path) -> bool:
    """Return whether the engine of a job was built. Only the engine writes progress into `result.json`, and records.

    False also for an engine that has refused an option of the sweep: it would refuse it in each job.
    """
    result = Result.read(run_dir)
    if result is not None and (result.error or "").startswith("sweep."):
        return False
    return (run_dir / RECORDS).exists() or (result is not None and bool(result.progress))
