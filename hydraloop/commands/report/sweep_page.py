"""The page of a sweep or a search: the curves of its jobs, what they have tried, and their table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydraloop.commands.report.page import Html, Page, element, note, rich_table, section
from hydraloop.commands.report.run_data import ACCENT, LAYOUT, QUIET, RunData, curves, trace
from hydraloop.commands.report.runs_page import head
from hydraloop.files.environment import shown
from hydraloop.files.metrics_log import FILENAME, read_some
from hydraloop.files.secrets import mask_command
from hydraloop.files.terminal import brief, clock, number
from hydraloop.sweeps import results, results_table
from hydraloop.sweeps.results import Results, Row
from hydraloop.sweeps.sweep_directory import SweepDirectory
from hydraloop.tracking.run_description import short_keys

_MOST = 500
"""Jobs that are shown, the best ones: a browser draws them in seconds."""
_POINTS, _METRICS = 300, 4
"""Points of a curve, and charts with the curves of all jobs, at most."""
_COLORED = 8
"""Up to so many curves have colors and names; more of them are grey."""
_FEWEST = 5
"""Jobs with a result. The table shows fewer of them better than figures."""
_WIDE_RANGE = 100
"""Numbers above 0 whose ends have at least this ratio get a logarithmic axis."""
_OVER = ("finished", "stopped", "failed", "pruned")


def write(directory: SweepDirectory, output: Path) -> None:
    """Write the page of a sweep. Errors: as of `Page.write`."""
    found, name = results.collect(directory), shown(directory.path)
    page = Page(f"{name} - hydraloop")
    left = directory.description.jobs.count - sum(row.status in _OVER for row in found.rows)
    runs = directory.holder() is not None or any(row.status == "running" for row in found.rows)
    status = "running" if runs else "interrupted" if left else "finished"
    search = found.search
    commands = {"": mask_command([*directory.description.command, *directory.description.overrides])}
    if found.best is not None:
        text, _, command = results_table.best_lines(directory, found).partition("\n  ")
        commands[text] = command
    shown_job = next(iter((*found.best_jobs, *(row.job for row in found.rows[:1]))), 0)
    known: dict[str, object] = {
        **RunData(directory.run_dir(directory.state(shown_job))).subject,
        "jobs": len(found.rows),
        **Counter[str](row.status for row in found.rows),
        "time of all jobs": clock(sum(row.seconds for row in found.rows)),
    }
    page.write(
        output,
        head(name, status, known, commands),
        *_left_out(directory, found, left, status),
        section("Curves", _charts(page, directory, found)),
        section("What was tried", *_tried(page, directory, found)),
        section("Pareto front", search and search.pareto and rich_table(results_table.pareto_table(found, search))),
        section("Jobs", rich_table(results_table.jobs_table(found, _MOST))),
        section("Averages", found.average and rich_table(results_table.averages_table(found, _MOST))),
    )


def _left_out(directory: SweepDirectory, found: Results, left: int, status: str) -> Iterator[Html]:
    """Yield how far the sweep is, and what the page does not show."""
    count = directory.description.jobs.count
    if left:
        how = "still runs" if status == "running" else "has not ended"
        yield note(f"This sweep {how}: {count - left:,} of {count:,} jobs are over.")
    if len(found.rows) > _MOST:
        text = f"Left out: all but the best {_MOST:,} of {len(found.rows):,} jobs."
        yield note(f"{text} hydraloop results writes all rows into {results.CSV}.")


def _charts(page: Page, directory: SweepDirectory, found: Results) -> Html | None:
    """Return a chart for each metric with the curves of jobs, the best on top."""
    names = (*(found.search.objectives if found.search else ()), found.metric, "loss")
    metrics = list(dict.fromkeys([*(f"val/{name}" for name in names if name), "train/loss"]))[:_METRICS]
    traces: dict[str, list[dict[str, Any]]] = {name: [] for name in metrics}
    for index, row in reversed([*enumerate(found.rows[:_MOST])]):
        is_best = row.job in found.best_jobs
        is_named = is_best or len(found.rows) <= _COLORED
        color = ACCENT if is_best else index if is_named else QUIET
        style = {"showlegend": is_named, "opacity": 1 if is_named else 0.4, "hovertemplate": _on_hover(row)}
        records = read_some(directory.run_dir(directory.state(row.job)) / FILENAME, _POINTS)
        for name, curve in curves(records, metrics).items():
            label = f"best: job {row.job}" if is_best else f"job {row.job}"
            traces[name].append(trace(curve, label, color=color, is_thin=not is_named) | style)
    plots = [page.figure(name, drawn, LAYOUT) for name, drawn in traces.items() if drawn]
    return element("div", *plots, class_="grid") if plots else None


@dataclass(frozen=True)
class _Axis:
    """The values of jobs for a key or a metric."""

    title: str
    values: list[float | None]
    """Numbers; of choices, their indices. None: the job does not set the key."""
    marks: dict[float, str]
    """The texts of the two ends, or of all choices, by their values."""
    layout: Mapping[str, Any]
    """Of plotly."""

    def place(self, value: float | None) -> float | None:
        """Return the place of a value between the ends of the axis: 0 to 1."""
        scale = math.log if self.layout.get("type") == "log" else float
        low, high = scale(min(self.marks)), scale(max(self.marks))
        return None if value is None else (scale(value) - low) / ((high - low) or 1.0)


def _tried(page: Page, directory: SweepDirectory, found: Results) -> Iterator[Html]:
    """Yield parallel coordinates, the results over each key, the Pareto front and the importance of keys.

    Jobs that have ended early count with their last value.
    """
    search = found.search
    names = (list(search.objectives) if search else []) or [found.metric or ""]
    rows = [row for row in found.rows if row.metric == names[0] and row.value is not None and math.isfinite(row.value)]
    rows = [row for row in rows if len(names) in (1, len(row.objectives))]
    if len(rows) < _FEWEST:
        return
    rows = rows[:_MOST]
    colors = [QUIET if index > len(rows) // 10 else ACCENT for index in range(len(rows))]
    results = [_axis(name, [str(row.objectives.get(name, row.value)) for row in rows]) for name in names]
    keys = [key for key in found.keys if key != found.average and len({row.swept.get(key) for row in rows}) > 1]
    axes = [_of_key(directory, key, short, rows) for key, short in short_keys(keys).items()]
    if len(axes) > 1:
        yield _parallel(page, [*results, *axes], rows, colors)
    charts = [_dots(page, axis, result, rows, colors) for result in results for axis in axes]
    if search is not None and len(results) == 2:
        front = {job for point in search.pareto for job in point.jobs}
        of_front = [ACCENT if row.job in front else QUIET for row in rows]
        charts.append(_dots(page, results[0], results[1], rows, of_front, "Pareto front (orange)"))
    if search is not None and search.importance:
        shares = dict(reversed(search.importance.items()))
        bars = {"type": "bar", "orientation": "h", "y": [*shares], "x": [*shares.values()], "marker": {"color": ACCENT}}
        charts.append(page.figure("Importance of keys (PED-ANOVA, 1 in all)", [bars], {}))
    yield element("div", *charts, class_="grid")


def _of_key(directory: SweepDirectory, key: str, short: str, rows: Sequence[Row]) -> _Axis:
    """Return the axis of a key. Choices have the order in which they were typed."""
    search, tried = directory.description.jobs.search, [row.swept.get(key) for row in rows]
    choices = [one.choices for one in search.space.dimensions if one.key == key] if search else []
    by_job = [row.swept[key] for row in sorted(rows, key=lambda row: row.job) if key in row.swept]
    return _axis(short, tried, [text for text in (*sum(choices, ()), *by_job) if text in tried])


def _axis(title: str, texts: Sequence[str | None], choices: Sequence[str] = ()) -> _Axis:
    layout: dict[str, Any] = {"title": {"text": title}}
    try:
        numbers = [None if text is None else float(text) for text in texts]
        known = [one for one in numbers if one is not None]
        low, high = min(known), max(known)
        if not math.isfinite(sum(known)):
            raise ValueError
    except ValueError:
        plain = [*dict.fromkeys(map(_plain, choices))]
        layout |= {"tickvals": [*range(len(plain))], "ticktext": plain}
        indices = [None if text is None else plain.index(_plain(text)) for text in texts]
        return _Axis(title, [*indices], dict(enumerate(plain)), layout)
    if low > 0 and high / low >= _WIDE_RANGE:
        layout |= {"type": "log", "dtick": 1, "exponentformat": "power"}
    return _Axis(title, numbers, {one: f"{one:.4g}" for one in (low, high)}, layout)


def _plain(text: str) -> str:
    return brief(text.strip("\"'"))


def _on_hover(row: Row) -> str:
    swept = [f"{key}={_plain(value)}" for key, value in row.swept.items()]
    values: Mapping[str, float | None] = row.objectives or {row.metric or "": row.value}
    reached = [f"{name} {number(value)}" for name, value in values.items()]
    return "<br>".join([f"job {row.job}", *swept, *reached]) + "<extra></extra>"


def _parallel(page: Page, axes: Sequence[_Axis], rows: Sequence[Row], colors: Sequence[str]) -> Html:
    """Return parallel coordinates: a line for each job, the best on top."""
    lines = [
        {
            "y": [axis.place(axis.values[index]) for axis in axes],
            "mode": "lines",
            "line": {"color": colors[index], "width": 1.4 if index else 3},
            "hovertemplate": _on_hover(row),
            "showlegend": False,
        }
        for index, row in reversed([*enumerate(rows)])
    ]
    marks = [(at, axis.place(value), text) for at, axis in enumerate(axes) for value, text in axis.marks.items()]
    texts = [
        {"x": at, "y": place, "text": text, "showarrow": False, "yshift": 9 if place else -9}
        for at, place, text in marks
    ]
    titles = {"tickvals": [*range(len(axes))], "ticktext": [axis.title for axis in axes]}
    layout = {"xaxis": titles, "yaxis": {"visible": False, "range": [-0.15, 1.12]}, "annotations": texts}
    return page.figure(f"Parallel coordinates: {axes[0].title} (the best tenth in orange)", lines, layout)


def _dots(
    page: Page, across: _Axis, up: _Axis, rows: Sequence[Row], colors: Sequence[str], title: str | None = None
) -> Html:
    """Return a dot for each job, the first job on top."""
    dots = {
        "x": across.values[::-1],
        "y": up.values[::-1],
        "mode": "markers",
        "marker": {"color": colors[::-1], "size": 9},
        "hovertemplate": [_on_hover(row) for row in rows[::-1]],
    }
    layout = {"xaxis": across.layout, "yaxis": up.layout}
    return page.figure(title or f"{up.title} over {across.title}", [dots], layout)
