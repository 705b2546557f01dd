"""What a search has found, beside the table of its jobs: trials, a Pareto front, importance, cost. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec

from hydraloop.sweeps.search.history import History, HistoryReader, Trial
from hydraloop.sweeps.search.sampler import Suggester, imported
from hydraloop.sweeps.search.search import Search
from hydraloop.sweeps.search.settings import Rule
from hydraloop.sweeps.search.space import Space
from hydraloop.sweeps.states import JobState
from hydraloop.sweeps.sweep_directory import SweepDirectory

FEWEST = 10
"""Complete trials that are needed to compute the importance of keys. It compares the best tenth with all."""
_MOST = 1000
"""Complete trials of which all are used. Of more, every n-th is used: a study of 10,000 trials takes 3 s."""


@dataclass(frozen=True, slots=True)
class Point:
    """A trial of the Pareto front: no other trial is better in one objective, and at least as good in the others."""

    trial: int
    jobs: tuple[int, ...]
    """Their numbers."""
    values: dict[str, float]
    """By objective. The mean over the jobs."""


@dataclass(frozen=True, slots=True)
class Cost:
    """What a search has cost until now."""

    iterations: int
    """Of all jobs."""
    hours: float
    """Wall-clock time of all attempts of all jobs that have ended."""
    pruned: int
    """Trials that were ended early."""
    promoted: int
    """Trials that were continued after a rung."""
    failed: int
    """Trials."""


@dataclass(frozen=True, slots=True)
class SearchResults:
    """What only a search has."""

    asked: int
    """Trials that were asked for."""
    trials: int
    """`sweep.trials`."""
    repeats: int
    """Jobs of a trial: trial 2 has the jobs `2 * repeats` to `3 * repeats - 1`."""
    objectives: dict[str, Rule]
    """`sweep.objectives`, each with which values are better. Empty: the metric that each job monitors."""
    values: dict[int, dict[str, float]]
    """The objectives of each job, by its number. Empty without `sweep.objectives`."""
    pareto: tuple[Point, ...]
    """With several objectives: the best by the first objective at first."""
    importance: dict[str, float] | None
    """The importance of each key by PED-ANOVA: 1 in all. None: fewer than FEWEST complete trials, equal results, or no
    Optuna."""
    cost: Cost


def collect(directory: SweepDirectory, search: Search, states: Sequence[JobState]) -> SearchResults:
    """Return what a search has found.

    Args:
        directory: of the sweep.
        states: of the jobs that were asked for.
    """
    history = HistoryReader(directory, search.settings, search.repeats).read()
    objectives = dict(search.settings.objectives)
    full = [one for one in history.trials if one.state == "complete"]
    found = [(history.job(one, repeat), values) for one in history.trials for repeat, values in one.results.items()]
    return SearchResults(
        asked=len(history.trials),
        trials=search.trials,
        repeats=history.repeats,
        objectives=objectives,
        values={job: dict(zip(objectives, values, strict=True)) for job, values in found} if objectives else {},
        pareto=_pareto(full, history) if len(objectives) > 1 else (),
        importance=_importance(search.space, replace(history, trials=full)),
        cost=_cost(history, states),
    )


def _jobs(trial: Trial, history: History) -> tuple[int, ...]:
    return tuple(history.job(trial, repeat) for repeat in range(history.repeats))


def _pareto(full: Iterable[Trial], history: History) -> tuple[Point, ...]:
    """Return the trials that no other one dominates."""
    signs = [-1 if rule == "greater" else 1 for rule in history.rules]
    front: list[tuple[list[float], Trial]] = []
    costs = (([sign * value for sign, value in zip(signs, one.values or (), strict=True)], one) for one in full)
    for cost, trial in sorted(costs, key=lambda pair: (pair[0], pair[1].number)):
        # Only an earlier trial of this order can be at least as good in all objectives.
        if not any(other != cost and all(map(float.__le__, other, cost)) for other, _ in front):
            front.append((cost, trial))
    names = history.metrics
    return tuple(
        Point(one.number, _jobs(one, history), dict(zip(names, one.values or (), strict=True))) for _, one in front
    )


def _importance(space: Space, full: History) -> dict[str, float] | None:
    """Return the importance of each key, the most important first; None if it cannot be computed."""
    if len(full.trials) < FEWEST or len({one.values for one in full.trials}) == 1 or find_spec("optuna") is None:
        return None
    importance, trials = imported().importance, full.trials[:: 1 + len(full.trials) // _MOST]
    study = Suggester(space, "random", 0).study(full, trials)
    found = importance.get_param_importances(study, evaluator=importance.PedAnovaImportanceEvaluator())
    return {str(key): float(share) for key, share in found.items()}


def _cost(history: History, states: Sequence[JobState]) -> Cost:
    ended = [trial.state for trial in history.trials]
    return Cost(
        iterations=sum(state.iterations for state in states),
        hours=sum(state.seconds for state in states) / 3600,
        pruned=ended.count("pruned"),
        promoted=len(set[int]().union(*history.promoted)),
        failed=ended.count("failed"),
    )
