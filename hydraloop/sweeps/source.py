"""Where a sweep's jobs come from. The controller starts what a source gives, and tells it how jobs have ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from hydraloop.sweeps.axes import Axes
from hydraloop.sweeps.states import JobState


@dataclass(frozen=True, slots=True)
class Job:
    """A job that a source gives."""

    number: int
    lines: tuple[str, ...]
    """Its overrides, not masked."""


class Source(Protocol):
    """Gives each job that is not over once. A resumed sweep has a new source."""

    def next_job(self) -> Job | None:
        """Return another job; None if all jobs are given out, or a running job must end first."""

    def ended(self, state: JobState) -> None:
        """Called when a job is over or is not started again, and at first for each job that was over before."""


class Grid(Source):
    """Gives the jobs of axes in the order of their numbers."""

    def __init__(self, axes: Axes) -> None:
        self._axes = axes
        self._next = 0
        self._over = set[int]()

    def next_job(self) -> Job | None:
        """Return the next job that is not over."""
        while self._next in self._over:
            self._next += 1
        if self._next >= self._axes.count:
            return None
        number = self._next
        self._next += 1
        return Job(number, self._axes.lines(number))

    def ended(self, state: JobState) -> None:
        """Note that a job is over."""
        self._over.add(state.number)
