"""What a search knows: `History`, from the states of its jobs and their records. Imports no Optuna."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hydraloop.errors import UserError
from hydraloop.sweeps.search import measures
from hydraloop.sweeps.search.measures import TrialState
from hydraloop.sweeps.search.settings import Rule, Settings
from hydraloop.sweeps.search.space import Params
from hydraloop.sweeps.states import JobState

if TYPE_CHECKING:
    from hydraloop.sweeps.sweep_directory import SweepDirectory


@dataclass(slots=True)
class Trial:
    """A point of the space, and what is known of it."""

    number: int
    params: Params
    notes: Mapping[str, Any] = field(default_factory=dict)
    """What the sampler has noted."""
    state: TrialState = "running"
    results: dict[int, tuple[float, ...]] = field(default_factory=dict)
    """The objectives of each job that has ended, by its number in the trial."""
    curve: dict[int, float] = field(default_factory=dict)
    """The monitored metric by validation, from 1; with `sweep.promote`, by rung."""
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

    repeats: int = 1
    """The jobs of a trial."""
    trials: list[Trial] = field(default_factory=list)
    """By number."""
    metrics: tuple[str, ...] = ()
    """The objectives. Empty until the first result."""
    rules: tuple[Rule, ...] = ()
    """Which values of each objective are better."""
    promoted: list[set[int]] = field(default_factory=list)
    """The trials that were promoted out of each rung."""
    rungs: list[dict[int, float]] = field(default_factory=list)
    """The values of all trials that have reached each rung."""
    problem: UserError | None = None
    """Why results cannot be compared."""

    def of(self, job: int) -> tuple[Trial, int]:
        """Return the trial of a job, and the number of the job in it."""
        return self.trials[job // self.repeats], job % self.repeats

    def job(self, trial: Trial, repeat: int = 0) -> int:
        """Return the number of a job of a trial."""
        return trial.number * self.repeats + repeat

    def best(self) -> Trial | None:
        """Return the best trial that is complete, with one objective; None if there is none."""
        if len(self.rules) != 1:
            return None
        found = [one for one in self.trials if one.state == "complete"]
        return min(found, key=lambda one: (rank(one.values, self.rules), one.number), default=None)


class HistoryReader:
    """Reads the history of a search again and again. What is over is read once.

    Args:
        directory: of the sweep.
        settings: of the search.
        repeats: the jobs of a trial.
    """

    def __init__(self, directory: SweepDirectory, settings: Settings, repeats: int) -> None:
        self._directory, self._settings, self._repeats = directory, settings, repeats
        self._over: dict[int, tuple[JobState, measures.Told]] = {}
        self._curves: dict[int, dict[int, float]] = {}
        """Of jobs that are over."""

    def read(self, running: Collection[int] = ()) -> History:
        """Return the history. Takes 20 us for each job that is not over.

        Args:
            running: jobs that are not over, whatever their files say: a controller starts them again.
        """
        history = History(self._repeats)
        for number in range(self._directory.count // self._repeats):
            trial = self._trial(number, running, history)
            history.trials.append(trial)
            self._add_rungs(trial, history)
        if self._settings.prune is not None and history.metrics:
            for trial in history.trials:
                if trial.state in ("complete", "pruned"):
                    trial.curve.update(self._curve(trial.jobs[0], history.metrics[0]))
        return history

    def _trial(self, number: int, running: Collection[int], history: History) -> Trial:
        jobs = range(number * self._repeats, (number + 1) * self._repeats)
        states, told = zip(*(self._job(job, running, history) for job in jobs), strict=True)
        trial = Trial(number, {}, state="failed", jobs=list(states))  # unless a `job.json` has its values
        for state in states:
            if state.params is not None:
                trial.params, trial.notes, trial.state = state.params, state.notes, _state([one.state for one in told])
                break
        for repeat, one in enumerate(told):
            if one.state == "complete" and one.values is not None:
                trial.results[repeat] = one.values
        return trial

    def _job(self, number: int, running: Collection[int], history: History) -> tuple[JobState, measures.Told]:
        """Return the state of a job and what it tells, and note the objectives in the history."""
        if number in self._over:
            state, told = self._over[number]
        else:
            state = self._directory.state(number)
            if number in running:
                return state, measures.Told("running")
            try:
                told = measures.measure(state, self._directory.run_dir(state), self._settings)
            except UserError as error:
                history.problem = history.problem or error
                return state, measures.Told("failed")
            if state.is_over:
                self._over[number] = state, told
        if told.values is not None:
            if told.metrics != (history.metrics or told.metrics):
                history.problem = history.problem or _other_metric(number, told.metrics[0], history.metrics[0])
                return state, measures.Told("failed")
            history.metrics, history.rules = told.metrics, told.rules
        return state, told

    def _add_rungs(self, trial: Trial, history: History) -> None:
        """Note the rungs that a trial has reached, and out of which it was promoted."""
        if self._settings.promote is None:
            return
        (job,) = trial.jobs
        values = list(job.rungs)
        if trial.state in ("paused", "pruned"):
            values.append(rung_value(job, self._directory, self._settings))
        for rung, value in enumerate(values):
            if rung == len(history.rungs):
                history.rungs.append({})
                history.promoted.append(set())
            history.rungs[rung][trial.number] = trial.curve[rung + 1] = value
            if rung < len(job.rungs):
                history.promoted[rung].add(trial.number)

    def _curve(self, job: JobState, metric: str) -> dict[int, float]:
        if job.number not in self._curves:
            found = measures.Validations(self._directory.run_dir(job), metric)
            self._curves[job.number] = dict(found.read())
        return self._curves[job.number]


def rung_value(job: JobState, directory: SweepDirectory, settings: Settings) -> float:
    """Return the objective of a paused job; NaN without one."""
    told = measures.measure(job, directory.run_dir(job), settings)
    return math.nan if told.values is None else told.values[0]


def _state(jobs: list[TrialState]) -> TrialState:
    """Return the state of a trial by those of its jobs."""
    for state in ("failed", "pruned", "running", "paused"):
        if state in jobs:
            return state
    return "complete"


def _other_metric(number: int, metric: str, earlier: str) -> UserError:
    problem = f"job {number} monitors {metric}, and earlier results are values of {earlier}"
    remedy = f"Start a search that names a metric of all jobs: 'sweep.objectives={{{metric}: max}}'."
    return UserError(problem, key="sweep.objectives", remedy=remedy)


def rank(values: tuple[float, ...] | None, rules: tuple[Rule, ...]) -> float:
    """Return the first objective for sorting, the best first; infinity for NaN and for none."""
    if values is None or not math.isfinite(values[0]):
        return math.inf
    return -values[0] if rules[0] == "greater" else values[0]
