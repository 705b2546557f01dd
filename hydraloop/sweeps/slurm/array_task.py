"""ArrayTask: a controller with one slot, in a task of a Slurm array.

Slurm starts a task again after a time limit, a preemption and the death of its node. Therefore a task ends as soon as
it has nothing to do, and a job that was interrupted is not started by every later task.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from hydraloop.processes.failure import REQUEUE
from hydraloop.run_files.lock import LEASE
from hydraloop.sweeps import queue
from hydraloop.sweeps.controller.controller import Controller
from hydraloop.sweeps.executors.executor import Ended
from hydraloop.sweeps.slurm.arrays import Task
from hydraloop.sweeps.states import JobState


@dataclass
class ArrayTask(Controller):
    """Runs one job after the other, until none is left or its time is over."""

    task: Task = field(kw_only=True)
    """How a job had ended before its submission does not count."""
    limit: float = math.inf
    """Seconds within which the task begins a job only if the longest job that it has run would end."""

    _is_stuck: bool = False
    """Whether the last job was interrupted without progress: it would repeat forever."""

    def __post_init__(self) -> None:
        self._began = time.monotonic()
        super().__post_init__()
        ends = [state.state for state in self.ended.values() if self._is_new(state)]
        self._has_failed = "failed" in ends or "interrupted" in ends

    def _is_new(self, state: JobState) -> bool:
        return state.ended is not None and state.ended > self.task.submitted

    def _leaves(self, state: JobState) -> bool:
        """Return whether a job is left as it is: Slurm has not started a task again for it, and no retry is left."""
        free = 1 if state.reason == queue.UNREPORTED else 0  # its task was killed, perhaps not because of the job
        if self._is_new(state) and state.state == "interrupted":
            return state.attempts > self.max_retries + self.task.restarts + free
        return super()._leaves(state) or (self._is_new(state) and state.state == "failed")

    @property
    def _waits_for_others(self) -> bool:
        is_early = self.task.restarts > 0 and time.monotonic() < self._began + LEASE
        return super()._waits_for_others and is_early

    @property
    def stops(self) -> bool:
        """Whether no further job starts."""
        own = (state.seconds for state in self.ended.values() if state.controller == self.directory.controller)
        return super().stops or time.monotonic() - self._began + max(own, default=0.0) > self.limit

    @property
    def left(self) -> list[int]:
        """The numbers of jobs that are not over, with the ends of other tasks, for which this one has not waited."""
        for state in map(self.directory.state, super().left):
            if state.is_over:
                self.ended[state.number] = state
        return super().left

    @property
    def code(self) -> int:
        """The exit code: 75 if Slurm is to start the task again, as its time is over; 1 if a job of it has failed."""
        if self.signals.first is not None:
            return 128 + self.signals.first if self._is_stuck else REQUEUE
        is_ours = any(state.controller == self.directory.controller for state in self.failed)
        return int(is_ours or self.problem is not None)

    def _starts_again(self, state: JobState, iterations: int, ended: Ended) -> bool:
        # Not by the exit code: Slurm sends the signal to the job, too, and a second one may change that.
        has_saved = state.preempted_by is not None and state.iterations > iterations
        self._is_stuck = state.state == "interrupted" and not has_saved
        return super()._starts_again(state, iterations, ended)
