"""The progress of a sweep and of its running jobs, from events and the ends of record logs. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from hydraloop.files.record_log import FILENAME, Record, read_end
from hydraloop.files.terminal import number
from hydraloop.sweeps.job_states import JobState, State
from hydraloop.sweeps.results import LAST, rank
from hydraloop.sweeps.sweep_directory import SweepDirectory

_TAIL = 4096
"""Bytes of a record log that are read. A record has about 200."""


@dataclass(slots=True)
class RunningJob:
    """A job that runs."""

    state: JobState
    iteration: int = 0
    """Completed iterations at the last record."""
    loss: str = ""
    metric: str = ""
    """The monitored metric at the last validation, with its name."""
    until: float | None = None
    """When it ends, in seconds since 1970, as its last record estimates."""

    def read_records(self, directory: SweepDirectory, monitored: str | None) -> None:
        """Read the last records of the job. Takes 0.1 ms."""
        log = directory.run_dir(self.state) / FILENAME
        try:
            records = read_end(log, _TAIL)
        except OSError:
            return
        for record in records:
            self.iteration = record.iteration
            if record.mode == "train":
                self.loss = _shown(record, "loss")
                is_of_attempt = record.timestamp >= (self.state.began or 0.0)
                self.until = (
                    record.timestamp + record.values["eta"] if is_of_attempt and "eta" in record.values else None
                )
            elif record.mode == "val":
                first = next(iter(record.values), "")
                self.metric = _shown(record, monitored if monitored and monitored in record.values else first)


@dataclass
class Progress:
    """The progress of a sweep."""

    directory: SweepDirectory
    states: dict[int, State] = field(default_factory=dict)
    """Of each job."""
    running: dict[int, RunningJob] = field(default_factory=dict)
    best: JobState | None = None
    """The best job of those that have ended."""
    _seconds: list[float] = field(default_factory=list)
    """The seconds of each job that has finished."""

    @classmethod
    def of(cls, directory: SweepDirectory, states: Iterable[JobState]) -> Progress:
        """Return the progress of a sweep."""
        made = cls(directory)
        for state in states:
            made.started(state) if state.state == "running" else made.ended(state)
        return made

    def started(self, state: JobState) -> None:
        """Note that a job runs."""
        self.states[state.number] = "running"
        self.running[state.number] = RunningJob(state)

    def ended(self, state: JobState) -> None:
        """Note the state of a job that does not run, or not here."""
        self.states[state.number] = state.state
        self.running.pop(state.number, None)
        if state.state in ("finished", "stopped"):
            self._seconds.append(state.seconds)
            best, place = self.best or state, rank(state.value, state.rule)
            is_better = place < rank(best.value, best.rule) or self.best is None
            if place != LAST and state.metric == best.metric and is_better:
                self.best = state

    def read_records(self) -> None:
        """Read the last records of the running jobs."""
        monitored = None if self.best is None else self.best.metric
        for job in self.running.values():
            job.read_records(self.directory, monitored)

    def seconds_left(self) -> float | None:
        """Estimate the time until all jobs have ended; None if none has finished yet, or nothing runs."""
        if not self._seconds or not self.running:
            return None
        left = sum(state in ("queued", "running", "interrupted") for state in self.states.values())
        return left * sum(self._seconds) / len(self._seconds) / len(self.running)


def _shown(record: Record, name: str) -> str:
    """Return a value as `loss 0.1234`; empty without the value."""
    return f"{name} {number(record.values[name])}" if name in record.values else ""
