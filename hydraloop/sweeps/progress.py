"""How far a running sweep is, from the files of its jobs."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from hydraloop.files.metrics_log import FILENAME, Record, read_end
from hydraloop.files.result import NO_CHECKPOINT
from hydraloop.files.terminal import brief, clock, number
from hydraloop.sweeps.job_states import JobState, State
from hydraloop.sweeps.results import LAST, rank
from hydraloop.sweeps.search import Rule
from hydraloop.sweeps.search_history import measure
from hydraloop.sweeps.sweep_directory import SweepDirectory

_TAIL = 4096
"""Bytes of a record log that are read. A record has about 200."""


@dataclass(slots=True)
class RunningJob:
    """A job or a run that runs."""

    state: JobState
    iteration: int = 0
    """Completed iterations at the last record."""
    loss: str = ""
    metric: str = ""
    """The monitored metric at the last validation, with its name."""
    until: float | None = None
    """When it ends, in seconds since 1970, as its last record estimates."""

    def read_records(self, run_dir: Path, monitored: str | None = None) -> None:
        """Read the last records of the job. Takes 0.1 ms."""
        try:
            records = read_end(run_dir / FILENAME, _TAIL)
        except OSError:
            return
        for record in records:
            self.iteration = record.iteration
            if record.mode == "train":
                self.loss = _shown(record, "loss")
                is_of_attempt = record.timestamp >= (self.state.began or 0.0)
                eta = record.values.get("eta")
                self.until = record.timestamp + eta if is_of_attempt and eta is not None else None
            elif record.mode == "val":
                first = next(iter(record.values), "")
                self.metric = _shown(record, monitored if monitored and monitored in record.values else first)

    def told(self) -> list[str]:
        """Return how far the job is, in words."""
        left = 0.0 if self.until is None else self.until - time.time()
        words = [f"iteration {self.iteration:,}" if self.iteration else "", self.metric or self.loss]
        return [*filter(None, words), *([f"about {clock(left)} left"] if left > 0 else [])]


@dataclass
class Progress:
    """The progress of a sweep."""

    directory: SweepDirectory
    states: dict[int, State] = field(default_factory=dict)
    """Of each job."""
    running: dict[int, RunningJob] = field(default_factory=dict)
    best: JobState | None = None
    """The best job of those that have ended, with the first objective as its metric."""
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
            if reached := self.reached(state):
                name, value = next(iter(reached.items()))
                state = replace(state, metric=name, value=value, rule=self._objectives.get(name, state.rule))
            best, place = self.best or state, rank(state.value, state.rule)
            is_better = place < rank(best.value, best.rule) or self.best is None
            if place != LAST and state.metric == best.metric and is_better:
                self.best = state

    @property
    def _objectives(self) -> Mapping[str, Rule]:
        """`sweep.objectives`. Empty: the metric that each job monitors."""
        search = self.directory.description.jobs.search
        return {} if search is None else search.objectives

    def reached(self, state: JobState) -> dict[str, float]:
        """Return the objectives of a job that has ended; empty if it has none."""
        search = self.directory.description.jobs.search
        if search is not None and search.objectives:
            found = measure(state, self.directory.run_dir(state), search)
            return {} if found.values is None else dict(zip(found.metrics, found.values, strict=True))
        return {} if state.metric is None or state.value is None else {state.metric: state.value}

    def read_records(self) -> None:
        """Read the last records of the running jobs."""
        monitored = next(iter(self._objectives), None if self.best is None else self.best.metric)
        for job in self.running.values():
            job.read_records(self.directory.run_dir(job.state), monitored)

    def seconds_left(self) -> float | None:
        """Estimate the time until all jobs have ended; None if none has finished yet, or nothing runs."""
        if not self._seconds or not self.running:
            return None
        left = max(self.directory.description.jobs.count - len(self.states), 0)  # of trials that have not begun
        left += sum(state in ("queued", "running", "interrupted") for state in self.states.values())
        return left * sum(self._seconds) / len(self._seconds) / len(self.running)

    def best_lines(self) -> list[str]:
        """Return a line about the best job; none without a result, or with several objectives."""
        best, jobs = self.best, self.directory.description.jobs
        if best is None or len(self._objectives) > 1:
            return []
        swept = brief(" ".join(jobs.swept_lines(self.directory.lines(best))))
        note = NO_CHECKPOINT if best.checkpoint is None else ""
        label = "best without averages" if self.directory.description.averaged else "best"
        return [f"{label}: job {best.number}, {best.metric} {number(best.value)}{note} ({swept})"]


def _shown(record: Record, name: str) -> str:
    """Return a value as `loss 0.1234`; empty without the value."""
    return f"{name} {number(record.values[name])}" if name in record.values else ""
