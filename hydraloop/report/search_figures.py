"""Figures of what a sweep or a search has tried, by Optuna, whose study is rebuilt in memory."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from hydraloop.errors import not_installed
from hydraloop.report.markup import Html, note
from hydraloop.report.page import Page
from hydraloop.sweeps.report.results import Results
from hydraloop.sweeps.report.search_results import FEWEST
from hydraloop.sweeps.search.history import History, HistoryReader, Trial
from hydraloop.sweeps.search.sampler import imported, study
from hydraloop.sweeps.search.space import Dimension, Space
from hydraloop.sweeps.sweep_directory import SweepDirectory

_MOST = 300
"""Trials that are drawn, about. More would be seconds of work for a browser."""
_WIDE_RANGE = 100
"""Numbers of a grid whose ends have at least this ratio get a logarithmic axis."""


def search_figures(page: Page, directory: SweepDirectory, found: Results) -> Iterator[Html]:
    """Yield the figures: parallel coordinates, slices, the importance of keys, and the Pareto front."""
    if find_spec("optuna") is None:
        mistake = not_installed("optuna", use="draws what was tried")
        yield note(f"{mistake.problem}: {mistake.remedy}")
        return
    space, history, repeats = _tried(directory, found)
    full = [one for one in history.trials if one.state == "complete" and one.values is not None]
    drawn = [*full, *(_ended_early(history) if len(history.metrics) == 1 else [])]
    if len(drawn) < 2:
        return
    front = found.search.pareto if found.search else ()
    best = {point.trial for point in front} | {job // repeats for job in found.best_jobs}
    step = -(-len(drawn) // _MOST)
    if step > 1:
        yield note(f"Drawn: every {step}. of {len(drawn):,} trials, and the best.")
        drawn = [one for index, one in enumerate(drawn) if index % step == 0 or one.number in best]
        full = [one for one in drawn if one in full]
    from optuna import visualization as plots

    for index, name in enumerate(history.metrics):
        one = _of_objective(history, drawn, index)
        made = study(space, one, one.trials)
        yield _drawn(
            page, f"Parallel coordinates: {name}", partial(plots.plot_parallel_coordinate, made, target_name=name)
        )
        yield _drawn(page, f"Slices: {name}", partial(plots.plot_slice, made, target_name=name))
        if len(full) >= FEWEST:
            one = _of_objective(history, full, index)
            made = study(space, one, one.trials)
            evaluator = imported().importance.PedAnovaImportanceEvaluator()
            draw = partial(plots.plot_param_importances, made, evaluator=evaluator, target_name=name)
            yield _drawn(page, f"Importance (PED-ANOVA): {name}", draw)
    if len(names := list(history.metrics)) == 2:
        made = study(space, history, full)
        yield _drawn(page, "Pareto front", partial(plots.plot_pareto_front, made, target_names=names))


def _ended_early(history: History) -> list[Trial]:
    """Return the trials that are paused or pruned, with their last value as the result."""
    found = []
    for one in history.trials:
        value = one.curve[max(one.curve)] if one.state in ("paused", "pruned") and one.curve else math.nan
        if math.isfinite(value):
            found.append(replace(one, state="complete", results={0: (value,)}))
    return found


def _of_objective(history: History, full: Sequence[Trial], index: int) -> History:
    """Return a history with one of its objectives. Optuna takes each value of a larger study as one to minimize."""
    trials = [
        replace(one, results={repeat: (values[index],) for repeat, values in one.results.items()}) for one in full
    ]
    return replace(history, trials=trials, metrics=(history.metrics[index],), rules=(history.rules[index],))


def _drawn(page: Page, title: str, draw: Callable[[], Any]) -> Html:
    """Return a figure; nothing if Optuna cannot draw it, such as the importance of keys with equal results."""
    with suppress(ValueError, RuntimeError, ZeroDivisionError, IndexError), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = draw().to_plotly_json()
        for name in ("title", "width"):
            found["layout"].pop(name, None)
        if found["data"]:
            return page.figure(title, found["data"], found["layout"], of_optuna=True)
    return Html()


def _tried(directory: SweepDirectory, found: Results) -> tuple[Space, History, int]:
    """Return the space, the trials and the jobs of a trial; for a grid, of a search that has tried its jobs."""
    search = directory.description.jobs.search
    if search is not None:
        return search.space, HistoryReader(directory, search).read(), search.repeats
    rows = [row for row in found.rows if row.metric == found.metric and math.isfinite(row.value or math.nan)]
    texts = {key: {row.swept[key] for row in rows if key in row.swept} for key in found.keys}
    space = Space(tuple(_dimension(key, tried) for key, tried in texts.items() if len(tried) > 1))
    history = History(metrics=(found.metric or "value",), rules=("greater" if found.rule == "greater" else "less",))
    for row in rows:
        params = {
            one.key: row.swept[one.key] if one.choices else float(row.swept[one.key])
            for one in space.dimensions
            if one.key in row.swept
        }
        history.trials.append(Trial(row.job, params, state="complete", results={0: (row.value or 0.0,)}))
    return space, history, 1


def _dimension(key: str, texts: set[str]) -> Dimension:
    """Return what a grid has tried for a key: numbers, or choices."""
    try:
        low, high = min(map(float, texts)), max(map(float, texts))
    except ValueError:
        return Dimension(key, key, tuple(sorted(texts)))
    return Dimension(key, key, low=low, high=high, is_log=low > 0 and high / low >= _WIDE_RANGE)
