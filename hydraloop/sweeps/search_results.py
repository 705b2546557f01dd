"""What a search has found, beside the table of its jobs: a Pareto front and importance. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

from hydraloop.sweeps import search_sampler
from hydraloop.sweeps.axes import Space
from hydraloop.sweeps.search import Rule, Search
from hydraloop.sweeps.search_history import History, HistoryReader, Trial
from hydraloop.sweeps.sweep_directory import SweepDirectory

FEWEST = 10
"""Complete trials that are needed to compute the importance of keys. It compares the best tenth with all."""


@dataclass(frozen=True, slots=True)
class Point:
    """A trial of the Pareto front: no other trial is better in one objective, and at least as good in the others."""

    trial: int
    jobs: tuple[int, ...]
    """Their numbers."""
    values: dict[str, float]
    """By objective. The mean over the jobs."""


@dataclass(frozen=True, slots=True)
class SearchResults:
    """What only a search has."""

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


def collect(directory: SweepDirectory, search: Search) -> SearchResults:
    """Return what a search has found."""
    history, objectives = HistoryReader(directory, search).read(), dict(search.objectives)
    full = [one for one in history.trials if one.state == "complete"]
    found = [pair for one in history.trials for pair in one.results.items()]
    return SearchResults(
        repeats=search.repeats,
        objectives=objectives,
        values={job: dict(zip(objectives, values, strict=True)) for job, values in found} if objectives else {},
        pareto=_pareto(full, history) if len(objectives) > 1 else (),
        importance=_importance(search.space, history, full),
    )


def _pareto(full: Iterable[Trial], history: History) -> tuple[Point, ...]:
    """Return the trials that no other one dominates."""
    signs = [-1 if rule == "greater" else 1 for rule in history.rules]
    front: list[tuple[list[float], Trial]] = []
    costs = (([sign * value for sign, value in zip(signs, one.values or (), strict=True)], one) for one in full)
    for cost, trial in sorted(costs, key=lambda pair: (pair[0], pair[1].number)):
        # Only an earlier trial of this order can be at least as good in all objectives.
        if not any(other != cost and all(map(float.__le__, other, cost)) for other, _ in front):
            front.append((cost, trial))
    return tuple(
        Point(one.number, tuple(one.results), dict(zip(history.metrics, one.values or (), strict=True)))
        for _, one in front
    )


def _importance(space: Space, history: History, full: list[Trial]) -> dict[str, float] | None:
    """Return the importance of each key, the most important first; None if it cannot be computed."""
    if len(full) < FEWEST or len({one.values for one in full}) == 1 or find_spec("optuna") is None:
        return None
    importance, study = search_sampler.imported().importance, search_sampler.study(space, history, full)
    found = importance.get_param_importances(study, evaluator=importance.PedAnovaImportanceEvaluator())
    return {str(key): float(share) for key, share in found.items()}
