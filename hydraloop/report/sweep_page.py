"""The page of a sweep or a search."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hydraloop.engine.report.formats import brief, clock, number
from hydraloop.report.curves import ACCENT, QUIET, Curve, layout_of, trace
from hydraloop.report.markup import Html, element, facts, section, table
from hydraloop.report.page import Page
from hydraloop.report.run_page import badge, end_of
from hydraloop.report.search_figures import search_figures
from hydraloop.report.sweep_data import JOBS, SweepData, mean_and_band
from hydraloop.run_files.environment import shown
from hydraloop.safety.secrets import mask_command
from hydraloop.sweeps.report.results import CSV, Group, rerun_command
from hydraloop.sweeps.search.trials import Trials
from hydraloop.sweeps.states import LOG
from hydraloop.tracking.run_description import short_keys

_ROWS = 1000
"""Jobs in the table, the best ones."""
_FAILURES, _LINES = 20, 15
"""Failed jobs whose error is shown, and lines of their logs."""
_COLORED, _BANDS = 8, 8
"""Curves with colors of their own, and averages with bands. More of them are grey."""
_LABEL = 60
"""Characters of a name in a legend."""
_CROWDED = 50
"""So many grey curves are fainter."""
_OVER = ("finished", "stopped", "failed", "pruned")


def write(sweep: SweepData, output: Path) -> None:
    """Write the page of a sweep. Errors: as of `Page.write`."""
    directory, page = sweep.directory, Page(f"{shown(sweep.directory.path)} - hydraloop")
    typed = mask_command([*directory.description.command, *directory.description.overrides])
    page.write(
        output,
        element(
            "header", element("h1", shown(directory.path)), badge(_status(sweep)), element("p", element("code", typed))
        ),
        *_progress(sweep),
        section("Best", *_best(sweep)),
        section("Curves", *_curves(page, sweep)),
        section("Search" if sweep.results.search else "Swept keys", *search_figures(page, sweep)),
        section("Pareto front", *_pareto(sweep)),
        section("Jobs", *_jobs(sweep)),
        section("Averages", *_averages(sweep)),
        section("Failures", *_failures(sweep)),
    )


def _status(sweep: SweepData) -> str:
    if sweep.directory.controllers() or any(row.status == "running" for row in sweep.results.rows):
        return "running"
    return "finished" if _left(sweep) == 0 else "interrupted"


def _left(sweep: SweepData) -> int:
    return sweep.directory.description.axes.count - sum(row.status in _OVER for row in sweep.results.rows)


def _progress(sweep: SweepData) -> Iterator[Html]:
    """Yield how far the sweep is."""
    rows, axes, count = sweep.results.rows, sweep.directory.description.axes, Counter[str]()
    count.update(row.status for row in rows)
    found: dict[str, object] = {"trials": axes.title.partition(" trials")[0]} if isinstance(axes, Trials) else {}
    found |= {"jobs": f"{len(rows):,}"} | {name: f"{count[name]:,}" for name in count}
    found["time of all jobs"] = clock(sum(row.seconds for row in rows))
    yield facts(found)
    if left := _left(sweep):
        done, is_running = f"{axes.count - left:,} of {axes.count:,} jobs are over.", _status(sweep) == "running"
        yield element("p", f"This sweep {'still runs' if is_running else 'has not ended'}: {done}", class_="note")


def _best(sweep: SweepData) -> Iterator[Html]:
    """Yield the best job, or the best average, and the command that runs it again."""
    found, best = sweep.results, sweep.results.best
    if best is None:
        return
    value = best.mean if isinstance(best, Group) else best.value
    where = f"mean of {len(best.values)} jobs" if isinstance(best, Group) else f"job {best.job}"
    swept = {key: brief(best.swept[key]) for key in best.swept}
    yield facts({found.metric or "value": f"{number(value)} ({where})", **swept})
    yield element("pre", rerun_command(sweep.directory, *found.best_jobs))


def _curves(page: Page, sweep: SweepData) -> Iterator[Html]:
    """Yield a chart for each metric: the curves of all jobs, or their means with bands."""
    plots = []
    for name in sweep.metrics:
        drawn = [(label, jobs, [sweep.curves[job][name] for job in jobs if name in sweep.curves.get(job, ())])
                 for label, jobs in _lines(sweep)]  # fmt: skip
        traces = _traces([(label, jobs, found) for label, jobs, found in drawn if found], sweep)
        if traces:
            plots.append(page.figure(name, traces, layout_of(traces)))
    yield element("div", *plots, class_="grid") if plots else Html()
    if len(sweep.results.rows) > JOBS:
        left = f"Curves of the best {JOBS:,} of {len(sweep.results.rows):,} jobs. At most 300 points of each are drawn."
        yield element("p", left, class_="note")


def _lines(sweep: SweepData) -> list[tuple[str, tuple[int, ...]]]:
    """Return the label and the jobs of each curve, the best first."""
    found = sweep.results
    short = short_keys(found.keys)
    parts: Sequence[Any] = found.groups if found.average is not None else found.rows
    jobs = [one.jobs if isinstance(one, Group) else (one.job,) for one in parts]
    texts = [" ".join(f"{short[key]}={brief(value)}" for key, value in one.swept.items()) for one in parts]
    return [
        (textwrap.shorten(text, _LABEL, placeholder=" …") or f"job {own[0]}", own)
        for text, own in zip(texts, jobs, strict=True)
    ]


def _traces(lines: list[tuple[str, tuple[int, ...], list[Curve]]], sweep: SweepData) -> list[dict[str, Any]]:
    """Return the traces of a chart, the best on top."""
    traces: list[dict[str, Any]] = []
    few, best = len(lines) <= _COLORED, sweep.results.best_jobs
    for index, (label, jobs, found) in reversed(list(enumerate(lines))):
        is_best = jobs == best
        curve, deviation = mean_and_band(found) if len(found) > 1 else (found[0], np.zeros(0))
        color = ACCENT if is_best else index if few else QUIET
        text = f"job {jobs[0]}: {label}" if len(jobs) == 1 else f"{label}, jobs {jobs[0]} to {jobs[-1]}"
        name = (f"best: {label}" if few else f"best: job {jobs[0]}") if is_best else label
        one = trace(curve, name, color=color, is_thin=not (few or is_best))
        one |= {"hovertemplate": f"{text}<br>iteration %{{x}}: %{{y:.4g}}<extra></extra>", "showlegend": few or is_best}
        if color == QUIET:
            one["opacity"] = 0.5 if len(lines) < _CROWDED else 0.15
        if len(deviation) and (few or is_best):
            traces += _band(curve, deviation, color)
        traces.append(one)
    return traces


def _band(curve: Curve, deviation: Any, color: int | str) -> list[dict[str, Any]]:
    """Return the traces of a band of one standard deviation."""
    edge = {"x": curve.iterations, "mode": "lines", "line": {"width": 0, "color": color}, "hoverinfo": "skip"}
    edge |= {"showlegend": False}
    return [edge | {"y": curve.values - deviation}, edge | {"y": curve.values + deviation, "fill": "tonexty"}]


def _jobs(sweep: SweepData) -> Iterator[Html]:
    """Yield the table of jobs."""
    found = sweep.results
    short = short_keys(found.keys)
    others = [] if found.search is None else list(found.search.objectives)[1:]
    infeasible = set(() if found.search is None else found.search.infeasible)
    rows = []
    for row in found.rows[:_ROWS]:
        status = f"{row.status}, infeasible" if row.job in infeasible else row.status
        swept = [brief(row.swept.get(key, "")) for key in short]
        error = (row.error or "").partition("\n")[0][:200]
        values = [row.value, *(row.objectives.get(name) for name in others)]
        rows.append((row.job, *swept, status, *values, row.step, f"{row.seconds:.1f}", error))
    headers = ("job", *short.values(), "status", found.metric or "value", *others, "step", "seconds", "error")
    yield table(headers, rows, sortable=True)
    if len(found.rows) > _ROWS:
        text = f"The best {_ROWS:,} of {len(found.rows):,} jobs. `hydraloop results` writes all into {CSV}."
        yield element("p", text, class_="note")


def _averages(sweep: SweepData) -> Iterator[Html]:
    """Yield the table of averages."""
    found = sweep.results
    if found.average is None:
        return
    keys = [key for key in found.keys if key != found.average]
    rows = [
        (*(brief(group.swept.get(key, "")) for key in keys), len(group.values), group.mean, group.deviation)
        for group in found.groups[:_ROWS]
    ]
    headers = (*short_keys(keys).values(), "jobs", f"mean {found.metric or 'value'}", "sd")
    yield table(headers, rows, sortable=True)


def _pareto(sweep: SweepData) -> Iterator[Html]:
    """Yield the table of the trials that no other trial dominates."""
    search = sweep.results.search
    if search is None or not search.pareto:
        return
    rows = [
        (
            ", ".join(map(str, point.jobs)),
            *point.values.values(),
            element("code", rerun_command(sweep.directory, *point.jobs)),
        )
        for point in search.pareto[:_ROWS]
    ]
    yield table(("job", *search.objectives, "command"), rows, sortable=True)


def _failures(sweep: SweepData) -> Iterator[Html]:
    """Yield the errors of failed jobs, and the last lines of their logs."""
    failed = [
        row for row in sweep.results.rows if row.status == "failed" or (row.status == "interrupted" and row.error)
    ]
    for row in failed[:_FAILURES]:
        folder = sweep.directory.folder(row.job)
        log = folder / LOG
        heading = element(
            "summary", sweep.directory.name(row.job), ": ", (row.error or row.status).partition("\n")[0][:200]
        )
        text = f"{row.error or ''}\n\n{end_of(log, _LINES) if log.is_file() else ''}".strip()
        yield element("details", heading, element("pre", text))
    if len(failed) > _FAILURES:
        yield element("p", f"and {len(failed) - _FAILURES:,} other jobs, see the table", class_="note")
