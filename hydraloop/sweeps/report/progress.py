"""The progress of a sweep and of its running jobs, from events and the ends of record logs. Imports no torch."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hydraloop.engine.report.formats import number
from hydraloop.run.record_log import FILENAME, NONFINITE, OBJECTS, STAMP
from hydraloop.sweeps.directory import SweepDirectory
from hydraloop.sweeps.states import JobState, State

_TAIL = 4096
"""Bytes of a record log that are read. A record has about 200."""
_NO_METRICS = frozenset({"mode", "epoch", "iteration", STAMP, NONFINITE, OBJECTS})


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
        if self.state.state != "running" or self.state.total is None:
            self.state = directory.state(self.state.number)
        if self.state.state != "running":
            return  # it is starting, or has ended a moment ago
        for record in self._new_records(directory):
            self.iteration = record["iteration"]
            if record.get("mode") == "train":
                self.loss = _shown(record, "loss")
                self.until = self._end(record.get("eta"), record.get(STAMP))
            elif record.get("mode") == "val":
                names = [name for name in record if name not in _NO_METRICS]
                self.metric = _shown(record, monitored if monitored in names else next(iter(names), ""))

    def _end(self, left: Any, stamp: Any) -> float | None:
        """Return when the job ends by one of its records; None if that is of an earlier attempt, or has no estimate."""
        if not isinstance(left, int | float) or not isinstance(stamp, int | float):
            return None
        return stamp + left if stamp >= (self.state.began or 0.0) else None

    def _new_records(self, directory: SweepDirectory) -> list[dict[str, Any]]:
        """Return the records at the end of the log; empty if nothing was added since the last look."""
        try:
            with (directory.run_dir(self.state) / FILENAME).open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size == self._size:
                    return []
                self._size = size
                file.seek(max(0, size - _TAIL))
                lines = file.read(_TAIL).split(b"\n")[:-1]  # the last one has no end yet
        except OSError:
            return []
        records = []
        for line in lines:
            try:
                record = json.loads(line)
                records += [record] if isinstance(record["iteration"], int) else []
            except (ValueError, TypeError, KeyError):  # the first one has no beginning
                continue
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
        """Note that a job was started. Its state may be that before."""
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
    if state.value is None or state.rule is None or not math.isfinite(state.value):
        return False
    if best is None or best.value is None:
        return True
    sign = 1 if state.rule == "greater" else -1
    return state.metric == best.metric and sign * state.value > sign * best.value


def _shown(record: dict[str, Any], name: str) -> str:
    """Return an entry as `loss 0.1234`, also if it is NaN or infinite; empty without the entry."""
    if name not in record:
        return ""
    nonfinite = record.get(NONFINITE)
    value = nonfinite.get(name) if record[name] is None and isinstance(nonfinite, dict) else record[name]
    return f"{name} {number(value)}"
