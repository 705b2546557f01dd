"""The results of a sweep, at any time: rows, averages over seeds, the best job; and what only a search has."""

from __future__ import annotations

import csv
import io
import json
import math
import statistics
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from typing import Any

from hydraloop.files import atomic
from hydraloop.files.config_yaml import plain
from hydraloop.files.secrets import mask_command
from hydraloop.schemas.sweep import SweepConf
from hydraloop.sweeps import search_sampler
from hydraloop.sweeps.axes import Space, key_of
from hydraloop.sweeps.executors.slurm_queue import current_states
from hydraloop.sweeps.job_states import JobState, State
from hydraloop.sweeps.search import Rule, Search
from hydraloop.sweeps.search_history import History, HistoryReader, Trial
from hydraloop.sweeps.sweep_directory import SweepDirectory
from hydraloop.tracking.tracker import valid_utf8

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
    """The objectives of each job, also of a pruned one, by its number. Empty without `sweep.objectives`."""
    pareto: tuple[Point, ...]
    """With several objectives: the best by the first objective at first."""
    importance: dict[str, float] | None
    """The importance of each key by PED-ANOVA: 1 in all. None: fewer than FEWEST complete trials, equal results, or no
    Optuna."""


def collect_search(directory: SweepDirectory, search: Search) -> SearchResults:
    """Return what a search has found."""
    history, objectives = HistoryReader(directory, search).read(), dict(search.objectives)
    full = [one for one in history.trials if one.state == "complete"]
    found = [pair for one in history.trials for pair in one.reached.items()]
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
    evaluator = importance.PedAnovaImportanceEvaluator(target_quantile=_TARGET)
    found = importance.get_param_importances(study, evaluator=evaluator)
    return {str(key): float(share) for key, share in found.items()}


_TARGET = 0.25
"""The share of trials that count as good for the importance: with Optuna's tenth, two of 16, which tell nothing."""
CSV, JSON = "results.csv", "results.json"
_FIELDS = ("status", "metric", "value", "step", "checkpoint", "seconds", "error", "reason")
"""Columns of the table after the number of the job and what is swept."""
_OF_SWEEP = ("hydra.sweep", "hydra.mode")
"""Overrides of Hydra that have no effect on a single run, or forbid it."""


@dataclass(frozen=True, slots=True)
class Row:
    """A job."""

    job: int
    swept: dict[str, str]
    """The swept keys and their values, as typed; secrets masked. A key that the job does not set is missing."""
    status: State
    metric: str | None
    """The monitored metric."""
    value: float | None
    """The best value, else the last; None without a validation."""
    step: int | None
    """Iterations at that value."""
    checkpoint: str | None
    """Relative to the directory of the sweep."""
    seconds: float
    """Wall-clock time of all attempts that have ended."""
    error: str | None
    """Why it has failed."""
    reason: str | None
    """Why it was interrupted, paused or pruned, or has stopped early."""
    objectives: dict[str, float] = field(default_factory=dict)
    """With `sweep.objectives`: all of them. `metric` and `value` are the first."""


@dataclass(frozen=True, slots=True)
class Group:
    """Jobs that differ only in the key over which results are averaged."""

    swept: dict[str, str]
    """The other swept keys and their values."""
    jobs: tuple[int, ...]
    """Their numbers."""
    values: tuple[float, ...]
    """The results of those that have one."""
    mean: float | None
    deviation: float | None
    """The standard deviation; None for fewer than two results."""


@dataclass(frozen=True, slots=True)
class Results:
    """The results of a sweep."""

    keys: tuple[str, ...]
    """The swept keys."""
    metric: str | None
    """The metric by which jobs are compared: that of the first job that has a result."""
    rule: str | None
    """Which values of it are better: `greater`, `less`, or None if that is not known."""
    rows: tuple[Row, ...]
    """The best first. Jobs that cannot be compared are last, in the order of their numbers."""
    best: Row | Group | None
    """The best job, or the best average if results are averaged: the best job of a seed is only the luckiest."""
    average: str | None
    """The key over which results are averaged; None if it is not swept."""
    groups: tuple[Group, ...]
    """The best first."""
    search: SearchResults | None = None
    """What only a search has; None for a grid."""

    @property
    def best_jobs(self) -> tuple[int, ...]:
        """The jobs of `best`."""
        if self.best is None:
            return ()
        return self.best.jobs if isinstance(self.best, Group) else (self.best.job,)


def collect(directory: SweepDirectory) -> Results:
    """Read the states of all jobs, without those that a search has not asked for. 10,000 take a second, trials 5 s."""
    states, jobs = current_states(directory), directory.description.jobs
    search = None if jobs.search is None else collect_search(directory, jobs.search)
    metric, rule, values = _compared(states, search)
    rows = sorted((_row(directory, state, search) for state in states), key=lambda row: _order(row, values, rule))
    average = directory.description.averaged
    groups = _groups(rows, average, values, search)
    groups.sort(key=lambda group: rank(group.mean, rule))
    best: Row | Group | None = None
    if search is not None and len(search.objectives) > 1:
        pass  # the Pareto front takes its place
    elif average is not None:  # fewer results of equally good jobs have a better average by chance
        comparable = [group for group in groups if rank(group.mean, rule) != LAST]
        best = min(comparable, key=lambda group: len(group.jobs) - len(group.values), default=None)
    elif rows and _order(rows[0], values, rule)[0] == 0:
        best = rows[0]
    return Results(jobs.swept, metric, rule, tuple(rows), best, average, tuple(groups), search)


def _compared(
    states: Sequence[JobState], search: SearchResults | None
) -> tuple[str | None, str | None, dict[int, float]]:
    """Return the metric by which jobs are compared, which values of it are better, and the value of each job."""
    if search is not None and search.objectives:
        name, rule = next(iter(search.objectives.items()))
        complete = [one.number for one in states if one.state in ("finished", "stopped")]
        return name, rule, {job: search.values[job][name] for job in complete if job in search.values}
    ended = [one for one in states if one.has_diverged or (one.state in ("finished", "stopped") and one.metric)]
    first = min(ended, key=lambda one: one.has_diverged, default=None)  # one that has diverged may know another metric
    if first is None:
        return None, None, {}
    return first.metric, first.rule, {one.number: one.value or 0.0 for one in ended if one.metric == first.metric}


def _order(row: Row, values: Mapping[int, float], rule: str | None) -> tuple[int, float, int]:
    """Return a key for sorting rows: results, the best first; pruned jobs; other jobs."""
    is_last, place = rank(values.get(row.job), rule)
    if not is_last:
        return 0, place, row.job
    return (1, rank(row.value, rule)[1], row.job) if row.status == "pruned" else (2, 0.0, row.job)


def _row(directory: SweepDirectory, state: JobState, search: SearchResults | None) -> Row:
    checkpoint = None if state.checkpoint is None else f"{state.directory}/{state.checkpoint}"
    objectives = {} if search is None else search.values.get(state.number, {})
    metric, value = next(iter(objectives.items()), (state.metric, state.value))
    return Row(
        state.number,
        directory.swept(state),
        state.state,
        metric,
        value,
        state.step,
        checkpoint,
        state.seconds,
        None if state.error is None else valid_utf8(state.error),
        None if state.reason is None else valid_utf8(state.reason),
        objectives,
    )


LAST = (True, 0.0)
"""The rank of what cannot be compared."""


def rank(value: float | None, rule: str | None) -> tuple[bool, float]:
    """Return a key for sorting, with the best value first and those that cannot be compared last."""
    if value is None or rule is None or not math.isfinite(value):
        return LAST
    return False, -value if rule == "greater" else value


def _groups(
    rows: Iterable[Row], average: str | None, values: Mapping[int, float], search: SearchResults | None
) -> list[Group]:
    """Return the jobs of each trial of a search, or those of a grid with the same values of the other keys."""
    members: dict[Hashable, list[Row]] = {}
    for row in sorted(rows, key=lambda row: row.job) if average is not None else ():
        others = tuple((key, value) for key, value in row.swept.items() if key != average)
        members.setdefault(others if search is None else row.job // search.repeats, []).append(row)
    groups = []
    for jobs in members.values():
        swept = {key: value for key, value in jobs[0].swept.items() if key != average}
        found = tuple(values[row.job] for row in jobs if row.job in values)
        mean, deviation = mean_and_deviation(found) if found else (None, None)
        groups.append(Group(swept, tuple(row.job for row in jobs), found, mean, deviation))
    return groups


def mean_and_deviation(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean and the standard deviation of a sample; a single value has no deviation.

    Both are NaN if a value is not finite: a job that has diverged must not be left out of an average.
    """
    if not all(map(math.isfinite, values)):
        return math.nan, math.nan
    return statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None


def rerun_command(directory: SweepDirectory, *jobs: int) -> str:
    """Return the command that runs a job again as a single run, or jobs that differ only in the averaged key as a
    sweep. Secrets are masked.
    """
    described = directory.description
    program, flags = described.command[:2], described.command[2:]  # python -m hydraloop
    words = [*program, *(word for word in flags if word not in ("-m", "--multirun"))]
    typed = [(line.lstrip("+~"), line) for line in described.overrides]
    words += [line for text, line in typed if text.startswith(("hydra.", "hydra/")) and not text.startswith(_OF_SWEEP)]
    states = [directory.state(job) for job in jobs]
    lines = list(directory.lines(states[0]))
    if len(jobs) > 1:
        words.append("-m")
        values = ",".join(directory.swept(state)[described.average] for state in states)
        changed = {line: f"{line.partition('=')[0]}={values}" for line in lines if key_of(line) == described.average}
        lines = [changed.get(line, line) for line in lines]
        if described.average != SweepConf.average:
            lines.append(f"sweep.average={described.average}")
    return valid_utf8(mask_command([*words, *lines]))


def for_programs(directory: SweepDirectory, results: Results) -> dict[str, Any]:
    """Return the results for `results.json` and for `--json`. NaN and infinity are numbers."""
    content: dict[str, Any] = {"directory": str(directory.path), **asdict(results)}
    if results.best is not None:
        content["best"] = {**content["best"], "command": rerun_command(directory, *results.best_jobs)}
    if results.search is not None:
        del content["search"]["values"]  # the rows have them
        for point in content["search"]["pareto"]:
            point["command"] = rerun_command(directory, *point["jobs"])
    return content


def write(directory: SweepDirectory, results: Results) -> None:
    """Write `results.csv` and `results.json` atomically.

    Raises:
        OSError: one cannot be written.
    """
    table = io.StringIO(newline="")
    writer = csv.writer(table)
    others = () if results.search is None else tuple(results.search.objectives)[1:]
    writer.writerow(["job", *results.keys, *_FIELDS, *others])
    for row in results.rows:
        swept = [row.swept.get(key) for key in results.keys]
        cells = [*(getattr(row, name) for name in _FIELDS), *(row.objectives.get(name) for name in others)]
        writer.writerow([row.job, *swept, *cells])
    atomic.write_text(directory.path / CSV, table.getvalue())
    content = json.dumps(plain(for_programs(directory, results)), allow_nan=False)
    atomic.write_text(directory.path / JSON, content + "\n")
