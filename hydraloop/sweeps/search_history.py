"""What a search knows: `History`, from the states of its jobs and their records. Imports no Optuna."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hydraloop.errors import UserError
from hydraloop.files.metrics_log import FILENAME, Position, Reader, read_all
from hydraloop.files.result import Result, by_keys
from hydraloop.sweeps.axes import Params
from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.search import Rule, Search

if TYPE_CHECKING:
    from hydraloop.sweeps.sweep_directory import SweepDirectory

TrialState = Literal["running", "paused", "complete", "failed", "pruned"]
"""`running`: asked for, and not over. `failed`: an error, NaN, or out of memory."""
_BATCH = 1000
"""Records that are read at once."""


@dataclass(slots=True)
class Measured:
    """A job, and what a search is told of it."""

    job: JobState
    state: TrialState
    values: tuple[float, ...] | None = None
    """The objectives."""
    metrics: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    curve: dict[int, float] = field(default_factory=dict)
    """With `sweep.prune`: the monitored metric by validation, from 1. With `sweep.promote`: by rung, from 1."""


@dataclass(slots=True)
class Trial:
    """A point of the space, and what is known of it."""

    number: int
    params: Params
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the sampler has noted."""
    state: TrialState = "running"
    results: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """The objectives of each job that has ended, by its number in the sweep."""
    reached: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """The same, with those of paused and pruned jobs."""
    curve: dict[int, float] = field(default_factory=dict)
    """See `Measured`."""
    jobs: list[JobState] = field(default_factory=list)

    @property
    def values(self) -> tuple[float, ...] | None:
        """The objectives: the mean over the jobs; None if there is none."""
        if not self.results:
            return None
        return tuple(sum(column) / len(self.results) for column in zip(*self.results.values(), strict=True))


@dataclass
class History:
    """A search at a moment. The same files give the same history, and the same decisions."""

    trials: list[Trial] = field(default_factory=list)
    """By number."""
    metrics: tuple[str, ...] = ()
    """The objectives. Empty until the first result."""
    rules: tuple[Rule, ...] = ()
    """Which values of each objective are better."""
    problem: UserError | None = None
    """Why results cannot be compared."""


class HistoryReader:
    """Reads the history of a search again and again. What is over is read once.

    Args:
        directory: of the sweep.
        search: whose jobs are read.
    """

    def __init__(self, directory: SweepDirectory, search: Search) -> None:
        self._directory, self._search = directory, search
        self._over: dict[int, Measured] = {}

    def read(self) -> History:
        """Return the history. Takes 20 us for each job that is not over."""
        history, repeats = History(), self._search.repeats
        for number in range(self._directory.count // repeats):
            jobs = [self._job(job) for job in range(number * repeats, (number + 1) * repeats)]
            for one in jobs:
                if one.metrics and not history.metrics:
                    objectives = self._search.objectives
                    history.metrics = tuple(objectives) or one.metrics
                    history.rules = tuple(objectives.values()) or one.rules
                if one.metrics and one.metrics != history.metrics and history.problem is None:
                    problem = f"job {one.job.number} has {', '.join(one.metrics)}, and not {', '.join(history.metrics)}"
                    remedy = "Start a search that names a metric of all jobs: 'sweep.objectives={loss: min}'."
                    history.problem = UserError(problem, key="sweep.objectives", remedy=remedy)
            history.trials.append(_trial(number, jobs))
        return history

    def _job(self, number: int) -> Measured:
        if number in self._over:
            return self._over[number]
        state = self._directory.state(number)
        found = measure(state, self._directory.run_dir(state), self._search)
        if state.is_over:
            self._over[number] = found
        return found


def _trial(number: int, jobs: list[Measured]) -> Trial:
    """Return a trial with its jobs. Without a `job.json` that has its values, it has failed."""
    trial = Trial(number, {}, state="failed", curve=jobs[0].curve, jobs=[one.job for one in jobs])
    known = next((one.job for one in jobs if one.job.params is not None), None)
    if known is not None and known.params is not None:
        found = {one.state for one in jobs}
        order: tuple[TrialState, ...] = ("failed", "pruned", "running", "paused", "complete")
        trial.params, trial.notes = known.params, known.notes
        trial.state = next(state for state in order if state in found)
    trial.reached = {one.job.number: one.values for one in jobs if one.values is not None}
    complete = {one.job.number for one in jobs if one.state == "complete"}
    trial.results = {number: values for number, values in trial.reached.items() if number in complete}
    return trial


def measure(job: JobState, run_dir: Path, search: Search) -> Measured:
    """Return what a job has reached, by its files."""
    state: TrialState = "complete" if job.state in ("finished", "stopped") else "running"
    if job.state == "paused" or job.state == "pruned" or job.state == "failed":
        state = job.state
    found = Measured(job, state, curve=_rungs(job))
    if found.state in ("running", "failed"):
        return found
    if job.value is None or not math.isfinite(job.value) or job.metric is None:
        found.state = found.state if found.state in ("paused", "pruned") else "failed"
    elif search.objectives:
        known = _measured(job, run_dir)
        values = tuple(known.get(name, math.nan) for name in search.objectives)
        if all(map(math.isfinite, values)):
            found.values, found.metrics = values, tuple(search.objectives)
        elif search.objectives.keys() <= known.keys():
            found.state = "failed"
        else:
            found.metrics = tuple(known)
    else:
        rule = job.rule or ("greater" if by_keys(job.metric) else "less")
        found.values, found.metrics, found.rules = (job.value,), (job.metric,), (rule,)
    if search.promote is not None and found.state in ("paused", "pruned"):
        found.curve[len(found.curve) + 1] = math.nan if found.values is None else found.values[0]
    if search.prune is not None and found.metrics and found.state != "failed":
        found.curve = dict(Validations(run_dir, found.metrics[0]).read())
    return found


def _rungs(job: JobState) -> dict[int, float]:
    return dict(enumerate(job.rungs, 1))


def _measured(job: JobState, run_dir: Path) -> dict[str, float]:
    """Return the metrics of the best validation, the time [s] and the memory [MiB]."""
    result = Result.read(run_dir)
    found = {} if result is None else dict(result.val_metrics)
    records = read_all(run_dir / FILENAME)
    # All objectives are from one validation, so that one checkpoint can have them.
    found |= {one.iteration: one.values for one in records if one.mode == "val"}.get(job.step or 0, {})
    found |= {} if job.metric is None or job.value is None else {job.metric: job.value}
    memory = [one.values["memory"] for one in records if "memory" in one.values]
    found |= {"memory": max(memory)} if memory else {}
    return {**found, "time": job.seconds}


class Validations:
    """Reads the values of a metric in the validations of a run, also while it writes them.

    Args:
        run_dir: of the run.
        metric: whose values are read.
    """

    def __init__(self, run_dir: Path, metric: str) -> None:
        self._reader, self._metric = Reader(run_dir / FILENAME, Position()), metric
        self.values = dict[int, float]()
        """By validation, from 1."""

    def read(self) -> Iterator[tuple[int, float]]:
        """Yield the number, from 1, and the value of each new validation."""
        while True:
            records, self._reader.position = self._reader.read(_BATCH)
            for record in records:
                if record.mode == "val" and self._metric in record.values:
                    self.values[len(self.values) + 1] = record.values[self._metric]
                    yield len(self.values), record.values[self._metric]
            if len(records) < _BATCH:
                return
