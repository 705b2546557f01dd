"""Retries: whether a job that has ended early starts again."""

from __future__ import annotations

import signal
from collections import Counter
from dataclasses import dataclass, field

from hydraloop.sweeps.executors.executor import Ended
from hydraloop.sweeps.states import JobState

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
