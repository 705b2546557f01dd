"""Where a sweep's jobs come from. The controller starts what a source gives, and tells it how jobs have ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    """Gives each job that is not over once, and a paused job again. A resumed sweep has a new source."""

    waits: bool = False
    """Whether another process decides just now, so that `next_job` has to be called again."""

    @property
    def count(self) -> int:
        """The number of jobs that the sweep is to have."""

    def next_job(self) -> Job | None:
        """Return another job; None if all jobs are given out, or a running job must end first."""

    def ended(self, state: JobState) -> None:
        """Called when a job is over, paused or not started again, and at first for each such job of the directory."""

    def look(self, running: Iterable[JobState]) -> Mapping[int, str]:
        """Called several times a second. Return the jobs that are to end as pruned, with the reasons.

        Args:
            running: the jobs that this controller answers for.
        """


class Grid(Source):
    """Gives the jobs of axes in the order of their numbers."""

    def __init__(self, axes: Axes) -> None:
        self._axes = axes
        self._next = 0
        self._over = set[int]()

    @property
    def count(self) -> int:
        """The number of combinations."""
        return self._axes.count

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
        """Note that a job is over, or was interrupted and is not started again."""
        if state.is_over or state.state == "interrupted":
            self._over.add(state.number)

    def look(self, running: Iterable[JobState]) -> Mapping[int, str]:
        """Return no job."""
        return {}
