"""Where a sweep's jobs come from. The controller starts what a source gives, and tells it how jobs have ended."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hydraloop.sweeps.states import JobState


@dataclass(frozen=True, slots=True)
class Job:
    """A job that a source gives."""

    number: int
    lines: tuple[str, ...]
    """Its overrides, not masked."""


class Source(Protocol):
    """Gives each job that is not over once, and a paused job again. A resumed sweep has a new source."""

    @property
    def numbers(self) -> Sequence[int]:
        """The jobs that are to be over at the end."""

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
    """Gives the jobs of a grid in the order of their numbers.

    Args:
        jobs: the overrides of the jobs that the command line names, not masked, by number.
    """

    def __init__(self, jobs: Mapping[int, tuple[str, ...]]) -> None:
        self._jobs = dict(sorted(jobs.items()))
        self._numbers = tuple(self._jobs)

    @property
    def numbers(self) -> Sequence[int]:
        """The jobs that the command line names."""
        return self._numbers

    def next_job(self) -> Job | None:
        """Return the next job that is not over."""
        for number in self._jobs:
            return Job(number, self._jobs.pop(number))
        return None

    def ended(self, state: JobState) -> None:
        """Note that a job is over, or was interrupted and is not started again."""
        if state.is_over or state.state == "interrupted":
            self._jobs.pop(state.number, None)

    def look(self, running: Iterable[JobState]) -> Mapping[int, str]:
        """Return no job."""
        return {}
