"""The page of a sweep or a search: its progress, the curves of its jobs, what they have tried, and their table."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import numpy as np

from hydraloop.commands.report.page import Html, Page, element, note, rich_table, section
from hydraloop.commands.report.run_data import ACCENT, DASHES, LAYOUT, QUIET, RunData, trace
from hydraloop.commands.report.runs_page import curves, head, problem, summary
from hydraloop.files.environment import shown, without_project
from hydraloop.files.secrets import mask_command
from hydraloop.files.terminal import brief, clock, duration, number
from hydraloop.schemas.sweep import SweepConf
from hydraloop.sweeps import results, results_table
from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.results import Group, Results, Row
from hydraloop.sweeps.search import Search
from hydraloop.sweeps.sweep_directory import SweepDirectory
from hydraloop.tracking.run_description import short_keys

_MOST = 500
"""Jobs that are shown, the best ones: a browser draws them in seconds."""
_POINTS, _METRICS = 200, 4
"""Points of a curve, and charts with the curves of all jobs, at most."""
_COLORED = 8
"""Up to so many curves have colors and names; more of them are grey."""
_WIDE_RANGE = 100
"""Numbers above 0 whose ends have at least this ratio get a logarithmic axis."""
_LABELS = {"time": "time [s]", "memory": "memory [MiB]"}
"""Of objectives that have a unit."""
_COMPLETE = ("finished", "stopped")
"""States of jobs whose results are ranked."""
_COLORS = {"finished": "#2b8a3e", "stopped": "#0c8599", "paused": "#7048e8", "running": "#1971c2"}
_COLORS |= {"interrupted": "#f08c00", "failed": "#c92a2a", "pruned": "#a9b2bd"}
"""Colors of bars in the timeline."""


@dataclass(frozen=True)
class _Trial:
    """A job, or jobs that differ only in the averaged key: a dot of a figure."""

    jobs: tuple[int, ...]
    swept: Mapping[str, str]
    values: Mapping[str, float]
    """The finite results by metric. Of several jobs: the mean."""
    is_complete: bool
    """Whether its results are ranked. Those of a pruned or paused job are not."""
    deviation: float | None = None
    """Of several jobs: the standard deviation."""

    @property
    def on_hover(self) -> str:
        """The text that the mouse shows."""
        jobs = f"job{'s' * (len(self.jobs) > 1)} {', '.join(map(str, self.jobs))}"
        swept = [f"{key}={_plain(value)}" for key, value in self.swept.items()]
        reached = [f"{name} {number(value)}" for name, value in self.values.items()]
        return "<br>".join([jobs, *swept, *reached]) + "<extra></extra>"


def write(directory: SweepDirectory, output: Path, *, follow: bool = False) -> bool:
    """Write the page of a sweep, and return whether the sweep runs. Errors: as of `Page.write`.

    Args:
        follow: whether the page reloads itself while the sweep runs.
    """
    found, name = results.collect(directory), shown(directory.path)
    page = Page(f"{name} - hydraloop")
    rows, search = found.rows[:_MOST], found.search
    states = {row.job: directory.state(row.job) for row in found.rows}
    runs = {row.job: RunData(directory.run_dir(states[row.job]), _POINTS) for row in rows}
    over, count = sum(state.is_over for state in states.values()), directory.description.jobs.count
    is_running = directory.holder() is not None or any(row.status == "running" for row in found.rows)
    status = "running" if is_running else "interrupted" if over < count else "finished"
    commands = {"": mask_command([*directory.description.command, *directory.description.overrides])}
    if found.best is not None:
        text, _, command = results_table.best_lines(directory, found).partition("\n  ")
        commands[text] = command
    shown_job = next(iter((*found.best_jobs, *runs)), 0)
    subject = RunData(directory.run_dir(directory.state(shown_job))).subject
    known: dict[str, object] = {
        **{f"parameters of job {shown_job}" if name == "parameters" else name: fact for name, fact in subject.items()},
        "jobs": count if over == count else f"{over:,} of {count:,} are over",
        **Counter[str](row.status for row in found.rows),
        "time of all jobs": clock(sum(row.seconds for row in found.rows)),
    }
    left_out = f"Left out: all but the best {_MOST} jobs. hydraloop results writes all rows into {results.CSV}."
    metric = found.metric or next((row.metric for row in rows if row.metric), "")  # no job has ended yet
    names = list(search.objectives if search else ()) or [metric]
    trials = _trials(found, names)
    page.write(
        output,
        head(name, status, known, commands),
        note(left_out if len(found.rows) > _MOST else ""),
        section("Progress", *_best_so_far(page, found, names, trials, states), _timeline(page, rows, states)),
        section("Curves", _charts(page, found, trials, names, runs)),
        section("What was tried", _tried(page, found, trials, names, directory.description.jobs.search)),
        section("Pareto front", search and search.pareto and rich_table(results_table.pareto_table(found, search))),
        section("Averages", found.average and rich_table(results_table.averages_table(found, _MOST))),
        section(
            "Jobs",
            rich_table(results_table.jobs_table(found, _MOST), links=True),
            *(_report(page, directory, row, runs[row.job]) for row in rows),
        ),
        reload=follow and is_running,
    )
    return is_running


def _report(page: Page, directory: SweepDirectory, row: Row, run: RunData) -> Html:
    """Return the report of a job, which its row in the table opens."""
    swept = {key: _plain(value) for key, value in row.swept.items()}
    facts = swept | summary(run) | {"time": duration(row.seconds), "reason": row.reason}
    return element(
        "article",
        head(f"Job {row.job}", row.status, facts, {"": results.rerun_command(directory, row.job)}),
        *(problem(run, row.status) if row.status in ("failed", "interrupted") else ()),
        curves(page, {"": run.curves}),
        note(f"With its config and pictures: {without_project('report', run.path)}"),
        id=f"job-{row.job}",
        class_="job",
    )


def _trials(found: Results, names: Sequence[str]) -> list[_Trial]:
    """Return the trials, the best first."""
    if found.average is None or len(names) > 1:  # several objectives have no averages
        known = [(row, _finite(row.objectives or {row.metric or "": row.value})) for row in found.rows]
        return [
            _Trial((row.job,), row.swept, values, row.status in _COMPLETE and names[0] in values)
            for row, values in known
        ]
    missing = [len(one.jobs) - len(one.values) for one in found.groups]
    return [
        _Trial(one.jobs, one.swept, _finite({names[0]: one.mean}), count == min(missing), one.deviation)
        for one, count in zip(found.groups, missing, strict=True)
    ]


def _finite(values: Mapping[str, float | None]) -> dict[str, float]:
    return {name: value for name, value in values.items() if value is not None and math.isfinite(value)}


def _best_so_far(
    page: Page, found: Results, names: Sequence[str], trials: Sequence[_Trial], states: Mapping[int, JobState]
) -> Iterator[Html]:
    """Yield the results and the best one until then, by the number of trials that have ended, and by iterations."""
    name, *others = names
    ends = {job: state.attempt_times[-1][1] for job, state in states.items() if state.attempt_times}
    trials = [one for one in trials if ends.keys() >= {*one.jobs}]
    trials.sort(key=lambda one: max(ends[job] for job in one.jobs))
    if len(trials) < 2 or others:  # several objectives have a Pareto front
        return
    y = [one.values.get(name) for one in trials]
    ranked = [
        value if one.is_complete and value is not None else math.nan for one, value in zip(trials, y, strict=True)
    ]
    best = (np.fmax if found.rule == "greater" else np.fmin).accumulate(np.array(ranked))  # without NaN
    line = {"y": best, "name": "best so far", "mode": "lines", "line": {"color": ACCENT, "shape": "hv"}}
    what = "trials" if found.search or found.average else "jobs"
    costs = [*accumulate(sum(states[job].iterations for job in one.jobs) for one in trials)]
    by_number = {"title": {"text": f"{what} that have ended"}, "dtick": max(1, len(trials) // 8)}
    by_cost = {"title": {"text": f"iterations of these {what}"}}
    label = _LABELS.get(name, name)
    up = {"title": {"text": f"{label}, mean over {found.average}" if found.average else label}}
    figures = [
        page.figure(f"Best {name} by {title}{_hollow(trials)}", [_dots(trials, x, y), line | {"x": x}], layout)
        for title, x, layout in (
            (what, [*range(1, len(trials) + 1)], {"xaxis": by_number, "yaxis": up}),
            ("iterations", costs, {"xaxis": by_cost, "yaxis": up}),
        )
    ]
    yield element("div", *figures, class_="grid")


def _timeline(page: Page, rows: Sequence[Row], states: Mapping[int, JobState]) -> Html | None:
    """Return a bar for each attempt of a job. A slot runs one job at a time: an attempt takes the first free one."""
    attempts = [(*times, row) for row in rows for times in states[row.job].attempt_times]
    attempts += [(states[row.job].began or 0.0, time.time(), row) for row in rows if row.status == "running"]
    ends: list[float] = []
    bars: dict[str, list[dict[str, Any]]] = {}
    for start, end, row in sorted(attempts, key=lambda one: one[:2]):
        slot = next((slot for slot, free in enumerate(ends) if free <= start), len(ends))
        ends[slot : slot + 1] = [end]
        began = datetime.fromtimestamp(start).isoformat(" ", "milliseconds")
        bar = {"base": began, "x": 1e3 * (end - start), "y": slot + 1, "text": row.job}
        bar["hovertemplate"] = f"job {row.job}: {row.status}<br>{duration(end - start)}<extra></extra>"
        bars.setdefault(row.status, []).append(bar)
    style = {"type": "bar", "orientation": "h", "textposition": "inside", "insidetextanchor": "middle", "textangle": 0}
    traces = [
        style
        | {key: [one[key] for one in bars[status]] for key in bars[status][0]}
        | {"name": status, "marker": {"color": color}}
        for status, color in _COLORS.items()
        if status in bars
    ]
    slots = {"title": {"text": "slot"}, "dtick": max(1, len(ends) // 8), "autorange": "reversed"}
    layout = {"barmode": "overlay", "xaxis": {"type": "date"}, "yaxis": slots, "showlegend": True}
    layout |= {"uniformtext": {"mode": "hide", "minsize": 10}}  # numbers of jobs that fit into their bars
    return page.figure("Jobs by time and slot", traces, layout) if bars else None


def _charts(
    page: Page, found: Results, trials: Sequence[_Trial], names: Sequence[str], runs: Mapping[int, RunData]
) -> Html | None:
    """Return a chart for each metric with the curves of jobs, the best on top."""
    metrics = [*dict.fromkeys([*(f"val/{name}" for name in (*names, "loss")), "train/loss"])][:_METRICS]
    traces: dict[str, list[dict[str, Any]]] = {name: [] for name in metrics}
    by_job = {job: one for one in trials for job in one.jobs}
    best = "best average" if isinstance(found.best, Group) else "best"
    for index, (job, run) in reversed([*enumerate(runs.items())]):
        is_best = job in found.best_jobs
        is_named = is_best or len(runs) <= _COLORED
        style = {"showlegend": is_named, "opacity": 1 if is_named else 0.4, "hovertemplate": by_job[job].on_hover}
        for name in run.curves.keys() & traces.keys():
            label = f"{best}: job {job}" if is_best else f"job {job}"
            color = ACCENT if is_best else index if is_named else QUIET
            curve = trace(run.curves[name], label, color=color, is_thin=not is_named) | style
            if is_best:  # of an average, there are several
                curve["line"]["dash"] = DASHES[found.best_jobs.index(job) % len(DASHES)]
            traces[name].append(curve)
    layout = LAYOUT | {"legend": {"traceorder": "reversed"}}
    plots = [page.figure(name, drawn, layout) for name, drawn in traces.items() if drawn]
    return element("div", *plots, class_="grid") if plots else None


def _tried(
    page: Page, found: Results, trials: Sequence[_Trial], names: Sequence[str], asked: Search | None
) -> Html | None:
    """Return the results over each key, the Pareto front and the importance of keys."""
    search, trials = found.search, [one for one in trials[:_MOST] if one.values.keys() >= {*names}]
    keys = [key for key in found.keys if key not in (found.average, SweepConf.average)]  # seeds are no choice
    keys = [key for key in keys if len({one.swept.get(key) for one in trials}) > 1]
    reached = {name: _axis(_LABELS.get(name, name), [str(one.values[name]) for one in trials]) for name in names}
    of_best = [ACCENT] * max(1, len(trials) // 10) if found.rule else []  # they are ranked
    choices = {one.key: one.choices for one in asked.space.dimensions} if asked is not None else {}
    axes = {}
    for key, short in short_keys(keys).items():
        by_job = [one.swept[key] for one in sorted(trials, key=lambda one: one.jobs) if key in one.swept]
        axes[short] = _axis(short, [one.swept.get(key) for one in trials], [*choices.get(key, ()), *by_job])
    charts = []
    for (name, (y, up)), (short, (x, across)) in product(reached.items(), axes.items()):
        layout = {"xaxis": across, "yaxis": up}
        charts.append(page.figure(f"{name} over {short}{_hollow(trials)}", [_dots(trials, x, y, of_best)], layout))
    if search is not None and len(names) == 2:
        (x, across), (y, up) = reached.values()
        front = {job for point in search.pareto for job in point.jobs}
        of_front = [ACCENT if front & {*one.jobs} else QUIET for one in trials]
        layout = {"xaxis": across, "yaxis": up}
        charts.append(page.figure("Pareto front in orange", [_dots(trials, x, y, of_front)], layout))
    if search is not None and search.importance:
        shares = dict(reversed(search.importance.items()))
        bars = {"type": "bar", "orientation": "h", "y": [*shares], "x": [*shares.values()], "marker": {"color": ACCENT}}
        charts.append(page.figure("Importance of keys (PED-ANOVA, 1 in all)", [bars], {}))
    legend = note("Orange: the best tenth." if of_best else "")
    return element("div", legend, element("div", *charts, class_="grid")) if charts else None


def _axis(title: str, texts: Sequence[str | None], choices: Sequence[str] = ()) -> tuple[list[float | None], Any]:
    """Return the places of values on an axis, None for a missing one, and plotly's layout of the axis.

    Args:
        choices: the values in the order of the axis, if they are not numbers.
    """
    layout: dict[str, Any] = {"title": {"text": title}}
    try:
        numbers = [None if text is None else float(text) for text in texts]
        known = [one for one in numbers if one is not None]
        if not math.isfinite(sum(known)):
            raise ValueError
    except ValueError:
        plain = [*dict.fromkeys(map(_plain, choices))]
        layout |= {"tickvals": [*range(len(plain))], "ticktext": plain, "range": [-0.5, len(plain) - 0.5]}
        return [None if text is None else plain.index(_plain(text)) for text in texts], layout
    if known and min(known) > 0 and max(known) / min(known) >= _WIDE_RANGE:
        layout |= {"type": "log", "dtick": 1, "exponentformat": "power"}
    return numbers, layout


def _plain(text: str) -> str:
    return brief(text.strip("\"'"))


def _hollow(trials: Sequence[_Trial]) -> str:
    return " (hollow: not trained to the end)" if any(one.values and not one.is_complete for one in trials) else ""


def _dots(trials: Sequence[_Trial], x: Sequence[Any], y: Sequence[Any], colors: Sequence[str] = ()) -> dict[str, Any]:
    """Return a dot for each trial, the first one on top. Trials without a color are grey."""
    deviations = [one.deviation if one.values else None for one in trials]
    symbols = ["circle" if one.is_complete else "circle-open" for one in trials]
    colors = [*colors, *[QUIET] * (len(trials) - len(colors))]
    return {
        "x": x[::-1],
        "y": y[::-1],
        "mode": "markers",
        "marker": {"color": colors[::-1], "symbol": symbols[::-1], "size": 9},
        "error_y": {"array": deviations[::-1], "visible": any(deviations), "thickness": 1, "color": QUIET},
        "hovertemplate": [one.on_hover for one in reversed(trials)],
        "showlegend": False,
    }
