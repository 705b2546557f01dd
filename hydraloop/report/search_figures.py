"""Figures of what a sweep or a search has tried, by Optuna, whose study is rebuilt in memory."""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import Any

from hydraloop.errors import not_installed
from hydraloop.report.markup import Html, element
from hydraloop.report.page import Page
from hydraloop.report.sweep_data import SweepData
from hydraloop.sweeps.report.search_results import FEWEST
from hydraloop.sweeps.search.sampler import Suggester, imported
from hydraloop.sweeps.search.trials import Trials

_LOW, _HIGH, _LIGHTEST = (143, 163, 189), (232, 89, 12), 247
"""Colors of values, on light and on dark pages; and the red of Optuna's color for the lowest value, the highest red."""
_SCALE = tuple((at, f"rgb{color}") for at, color in enumerate((_LOW, _HIGH)))
_MOST = 500
"""Trials that are drawn, about. More would be seconds of work for a browser."""
_WIDE_RANGE = 100
"""Numbers of a grid whose ends have at least this ratio get a logarithmic axis."""


def search_figures(page: Page, sweep: SweepData) -> Iterator[Html]:
    """Yield the figures: parallel coordinates, slices, the importance of keys, and the Pareto front."""
    if find_spec("optuna") is None:
        mistake = not_installed("optuna", use="draws what was tried")
        yield element("p", f"{mistake.problem}: {mistake.remedy}", class_="note")
        return
    names, study = _study(sweep)
    complete = [trial for trial in study.trials if trial.values is not None]
    if len(complete) < 2:
        return
    if (step := _step(count := len(sweep.results.rows))) > 1:
        yield element("p", f"Drawn: every {step}. of {count:,} jobs or their trials, and the best.", class_="note")
    from optuna import visualization as plots

    evaluator = imported().importance.PedAnovaImportanceEvaluator()
    for index, name in enumerate(names):
        given: dict[str, Any] = {"target_name": name}
        if len(names) > 1:
            given["target"] = partial(_objective, index)
        draw = partial(plots.plot_parallel_coordinate, study, **given)
        yield _drawn(page, f"Parallel coordinates: {name}", draw)
        yield _drawn(page, f"Slices: {name}", partial(plots.plot_slice, study, **given))
        if len(complete) >= FEWEST:
            draw = partial(plots.plot_param_importances, study, evaluator=evaluator, **given)
            yield _drawn(page, f"Importance of the keys for {name} (PED-ANOVA)", draw)
    if len(names) in (2, 3):
        yield _drawn(page, "Pareto front", partial(plots.plot_pareto_front, study, target_names=list(names)))


def _objective(index: int, trial: Any) -> float:
    return float(trial.values[index])


def _drawn(page: Page, title: str, draw: Callable[[], Any]) -> Html:
    """Return a figure; nothing if Optuna cannot draw it, such as the importance of keys with equal results."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = draw().to_plotly_json()
    except (ValueError, RuntimeError, ZeroDivisionError, IndexError):
        return Html()
    for trace in found["data"]:
        _recolor(trace)
    layout = {name: value for name, value in found["layout"].items() if name not in ("title", "width", "plot_bgcolor")}
    for axis in (name for name in layout if name.startswith(("xaxis", "yaxis"))):
        if layout[axis].get("title", {}).get("text") == "Hyperparameter":  # it would be on the names of the keys
            del layout[axis]["title"]
    for label in layout.get("annotations", ()):
        label.get("font", {}).pop("color", None)
    return page.figure(title, found["data"], layout, wide=True) if found["data"] else Html()


def _recolor(trace: dict[str, Any]) -> None:
    """Replace Optuna's shades of blue, the best of which cannot be seen on a dark page."""
    if "colorscale" in trace.get("marker", {}):
        trace["marker"]["colorscale"] = _SCALE
    shade = re.fullmatch(r"rgb\(([\d.]+),.*\)", str(trace.get("line", {}).get("color")))
    if shade:
        share = min(max((_LIGHTEST - float(shade[1])) / _LIGHTEST, 0.0), 1.0)
        mixed = (round(low + share * (high - low)) for low, high in zip(_LOW, _HIGH, strict=True))
        trace["line"]["color"] = f"rgb({','.join(map(str, mixed))})"
        trace["opacity"] = 0.15 + 0.85 * share**2


def _study(sweep: SweepData) -> tuple[tuple[str, ...], Any]:
    """Return the names of the objectives, and a study with the trials of a search, or the jobs of a grid.

    Of more than `_MOST`, it has every n-th, and the best.
    """
    axes, found = sweep.directory.description.axes, sweep.results
    if isinstance(axes, Trials) and found.search is not None:
        assert axes.log is not None, "the search has a directory"
        history = axes.log.history
        best = {point.trial for point in found.search.pareto} | {job // history.repeats for job in found.best_jobs}
        trials = [one for one in history.trials if one.number % _step(len(history.trials)) == 0 or one.number in best]
        drawn = replace(history, trials=trials, earlier=[])
        return history.metrics or ("value",), Suggester(axes.space, "random", 0).study(drawn)
    lib = imported()
    rows = [row for row in found.rows if row.metric == found.metric and math.isfinite(row.value or math.nan)]
    spread = {key: _distribution(lib, {row.swept[key] for row in rows if key in row.swept}) for key in found.keys}
    study = lib.create_study(direction="maximize" if found.rule == "greater" else "minimize")
    for row in rows[:: _step(len(rows))]:
        values = {key: _number(text) if spread[key][1] else text for key, text in row.swept.items()}
        used = {key: spread[key][0] for key in values}
        study.add_trial(lib.trial.create_trial(value=row.value, params=values, distributions=used))
    return (found.metric or "value",), study


def _step(count: int) -> int:
    return -(-count // _MOST) or 1


def _distribution(lib: Any, texts: set[str]) -> tuple[Any, bool]:
    """Return the distribution of the values of a key, and whether they are numbers."""
    numbers = [_number(text) for text in texts]
    if len(texts) < 2 or not all(map(math.isfinite, numbers)):
        return lib.distributions.CategoricalDistribution(sorted(texts) or ("",)), False
    low, high = min(numbers), max(numbers)
    return lib.distributions.FloatDistribution(low, high, log=low > 0 and high / low >= _WIDE_RANGE), True


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan
