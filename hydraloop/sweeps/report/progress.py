"""The progress of a sweep and of its running jobs, from events and the ends of record logs. Imports no torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hydraloop.engine.report.formats import number
from hydraloop.run_files.record_log import FILENAME, Record, read_end
from hydraloop.sweeps.report.results import LAST, rank
from hydraloop.sweeps.states import JobState, State
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
    _size: int = 0
    """Of the record log at the last look."""

    def look(self, directory: SweepDirectory, monitored: str | None) -> None:
        """Read what the job has written since the last look. Takes 0.1 ms."""
        for record in self._new_records(directory.run_dir(self.state) / FILENAME):
            self.iteration = record.iteration
            if record.mode == "train":
                self.loss = _shown(record, "loss")
                self.until = self._end(record)
            elif record.mode == "val":
                first = next(iter(record.values), "")
                self.metric = _shown(record, monitored if monitored in record.values else first)

    def _end(self, record: Record) -> float | None:
        """Return when the job ends by one of its records; None if that is of an earlier attempt, or has no estimate."""
        left = record.values.get("eta")
        is_of_attempt = record.timestamp >= (self.state.began or 0.0)
        return record.timestamp + left if left is not None and is_of_attempt else None

    def _new_records(self, log: Path) -> list[Record]:
        """Return the records at the end of the log; empty if nothing was added since the last look."""
        try:
            size = log.stat().st_size
            records = [] if size == self._size else read_end(log, _TAIL)
        except OSError:
            return []
        self._size = size
        return records

    def seconds_left(self, now: float, usual: float | None) -> float | None:
        """Return when the job ends, by its last record, or by what jobs usually take; None if that is not known."""
        until = self.until
        if until is None and usual is not None and self.state.began is not None:
            until = self.state.began + usual
        return None if until is None else max(0.0, until - now)


@dataclass
class Progress:
    """The progress of a sweep. The cost of an event does not depend on the number of jobs."""

    directory: SweepDirectory
    running: dict[int, RunningJob] = field(default_factory=dict)
    counts: Counter[State] = field(default_factory=Counter)
    best: JobState | None = None
    """The best job of those that have ended."""
    _states: dict[int, State] = field(default_factory=dict)
    _seconds: float = 0.0
    """Of all jobs that have finished."""
    _finished: int = 0

    @classmethod
    def of(cls, directory: SweepDirectory, states: Iterable[JobState]) -> Progress:
        """Return the progress of a sweep."""
        made = cls(directory)
        for state in states:
            made.started(state) if state.state == "running" else made.ended(state)
        return made

    def started(self, state: JobState) -> None:
        """Note that a job runs."""
        self._note(state.number, "running")
        self.running[state.number] = RunningJob(state)

    def ended(self, state: JobState) -> None:
        """Note the state of a job that does not run, or not here."""
        self._note(state.number, state.state)
        self.running.pop(state.number, None)
        if state.state in ("finished", "stopped"):
            self._finished += 1
            self._seconds += state.seconds
            if _is_better(state, self.best):
                self.best = state

    def _note(self, job: int, now: State) -> None:
        if job in self._states:
            self.counts[self._states[job]] -= 1
        self._states[job] = now
        self.counts[now] += 1

    @property
    def usual(self) -> float | None:
        """The mean time of a job in seconds; None if none has finished."""
        return self._seconds / self._finished if self._finished else None

    def look(self) -> None:
        """Read what the running jobs have written."""
        monitored = None if self.best is None else self.best.metric
        for job in self.running.values():
            job.look(self.directory, monitored)

    def seconds_left(self, now: float) -> float | None:
        """Estimate the time until all jobs have ended; None if nothing is known yet, or nothing runs."""
        usual = self.usual
        left = [job.seconds_left(now, usual) for job in self.running.values()]
        known = [seconds for seconds in left if seconds is not None]
        if not known:
            return None
        if usual is None:  # no job has finished: one takes what it has taken, and what is left
            spent = [now - job.state.began for job in self.running.values() if job.until and job.state.began]
            usual = (sum(known) + sum(spent)) / len(known)
        todo = (self.counts["queued"] + self.counts["interrupted"] + len(left) - len(known)) * usual
        return max(*known, (sum(known) + todo) / len(left))


def _is_better(state: JobState, best: JobState | None) -> bool:
    if rank(state.value, state.rule) == LAST:
        return False
    if best is None:
        return True
    return state.metric == best.metric and rank(state.value, state.rule) < rank(best.value, state.rule)


def _shown(record: Record, name: str | None) -> str:
    """Return a value as `loss 0.1234`; empty without the value."""
    return f"{name} {number(record.values[name])}" if name in record.values else ""
