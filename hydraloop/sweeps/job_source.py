"""Source: gives the jobs of a sweep to its controller, one after the other. `Grid` has them from the beginning."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from hydraloop.sweeps.job_states import JobState


@dataclass(frozen=True, slots=True)
class Job:
    """A job that a source gives."""

    number: int
    lines: tuple[str, ...]
    """Its overrides, not masked."""


class Source(Protocol):
    """Gives each job that is not over once, and a paused job when it is promoted."""

    @property
    def numbers(self) -> Sequence[int]:
        """The jobs that are to be over at the end."""

    def next_job(self) -> Job | None:
        """Return another job; None if there is no other, or if a running job must end first."""

    def job_ended(self, state: JobState) -> None:
        """Called when a job is over, paused or not retried. Called at the start for each such job of the directory."""

    def jobs_to_prune(self, running: Iterable[JobState]) -> Mapping[int, str]:
        """Return the jobs that are to end early, with the reasons. Called several times a second.

        Args:
            running: the jobs that the controller runs.
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

    def job_ended(self, state: JobState) -> None:
        """Do not give a job that is over, or that was interrupted and is not retried."""
        if state.is_over or state.state == "interrupted":
            self._jobs.pop(state.number, None)

    def jobs_to_prune(self, running: Iterable[JobState]) -> Mapping[int, str]:
        """Return no job."""
        return {}
