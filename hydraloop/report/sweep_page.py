"""The page of a sweep or a search."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hydraloop.engine.report.formats import brief, clock
from hydraloop.report.curves import ACCENT, QUIET, Curve, curves, layout_of, trace
from hydraloop.report.markup import Html, element, facts, note, rich_table, section
from hydraloop.report.page import Page
from hydraloop.report.run_page import end_of, head
from hydraloop.report.search_figures import search_figures
from hydraloop.run_files.environment import shown
from hydraloop.run_files.record_log import FILENAME, read_some
from hydraloop.safety.secrets import mask_command
from hydraloop.sweeps.report import results, results_table
from hydraloop.sweeps.report.results import Results
from hydraloop.sweeps.states import LOG
from hydraloop.sweeps.sweep_directory import SweepDirectory
from hydraloop.tracking.run_description import short_keys

_ROWS, _JOBS = 1000, 500
"""Jobs in the table, and jobs whose curves are drawn, the best ones: a browser draws them in seconds."""
_POINTS, _METRICS = 300, 4
"""Points of a curve, and charts with the curves of all jobs, at most."""
_FAILURES, _LINES = 20, 15
"""Failed jobs whose error is shown, and lines of their logs."""
_COLORED, _LABEL = 8, 60
"""Up to so many curves have colors and a legend of their own; others are grey. Characters of a name in the legend."""
_OVER = ("finished", "stopped", "failed", "pruned")


def write(directory: SweepDirectory, output: Path) -> None:
    """Write the page of a sweep. Errors: as of `Page.write`."""
    found, name = results.collect(directory), shown(directory.path)
    page = Page(f"{name} - hydraloop")
    left = directory.description.jobs.count - sum(row.status in _OVER for row in found.rows)
    runs = directory.holder() is not None or any(row.status == "running" for row in found.rows)
    status = "running" if runs else "interrupted" if left else "finished"
    typed = mask_command([*directory.description.command, *directory.description.overrides])
    search = found.search
    page.write(
        output,
        head(name, status, typed, _facts(directory, found)),
        *_left_out(directory, found, left, status),
        section("Best", found.best and element("pre", results_table.best_lines(directory, found))),
        section("Curves", *_charts(page, directory, found)),
        section("What was tried", *search_figures(page, directory, found)),
        section(
            "Pareto front", search and search.pareto and rich_table(results_table.pareto_table(found, search, _ROWS))
        ),
        section("Jobs", rich_table(results_table.jobs_table(found, _ROWS))),
        section("Averages", found.average and rich_table(results_table.averages_table(found, _ROWS))),
        section("Failures", *_failures(directory, found)),
    )


def _facts(directory: SweepDirectory, found: Results) -> Html:
    jobs, counts = directory.description.jobs, Counter[str](row.status for row in found.rows)
    trials = None if jobs.search is None else jobs.title(len(found.rows)).partition(" trials")[0]
    seconds = sum(row.seconds for row in found.rows)
    return facts({"trials": trials, "jobs": len(found.rows), **counts, "time of all jobs": clock(seconds)})


def _left_out(directory: SweepDirectory, found: Results, left: int, status: str) -> Iterator[Html]:
    """Yield how far the sweep is, and what the page does not show."""
    count = directory.description.jobs.count
    if left:
        how = "still runs" if status == "running" else "has not ended"
        yield note(f"This sweep {how}: {count - left:,} of {count:,} jobs are over.")
    if (count := len(found.rows)) > _JOBS:
        text = f"Left out: curves of all but the best {_JOBS:,} of {count:,} jobs; rows of all but the best {_ROWS:,}."
        yield note(f"{text} hydraloop results writes all rows into {results.CSV}.")


def _charts(page: Page, directory: SweepDirectory, found: Results) -> list[Html]:
    """Return a chart for each metric: the curves of all jobs, or their means with bands."""
    names = (*(found.search.objectives if found.search else ()), found.metric, "loss")
    metrics = list(dict.fromkeys([*(f"val/{name}" for name in names if name), "train/loss"]))[:_METRICS]
    short = short_keys(found.keys)
    lines = []
    for one in found.rows if found.average is None else found.groups:
        label = " ".join(f"{short[key]}={brief(value)}" for key, value in one.swept.items())
        jobs = (one.job,) if isinstance(one, results.Row) else one.jobs
        lines.append((textwrap.shorten(label, _LABEL, placeholder=" …"), jobs))
    lines = lines[: _JOBS // max((len(jobs) for _, jobs in lines), default=1)]
    drawn = {job: _read(directory, job, metrics) for _, jobs in lines for job in jobs}
    plots = []
    for name in metrics:
        of_jobs = ((label, jobs, [drawn[job][name] for job in jobs if name in drawn[job]]) for label, jobs in lines)
        if traces := _traces([line for line in of_jobs if line[2]], found.best_jobs):
            plots.append(page.figure(name, traces, layout_of(traces)))
    return [element("div", *plots, class_="grid")] if plots else []


def _read(directory: SweepDirectory, job: int, metrics: Sequence[str]) -> dict[str, Curve]:
    return curves(read_some(directory.run_dir(directory.state(job)) / FILENAME, _POINTS), metrics)


def _traces(lines: list[tuple[str, tuple[int, ...], list[Curve]]], best: tuple[int, ...]) -> list[dict[str, Any]]:
    """Return the traces of a chart, the best on top."""
    traces: list[dict[str, Any]] = []
    few = len(lines) <= _COLORED
    for index, (label, jobs, found) in reversed(list(enumerate(lines))):
        is_best, text = jobs == best, f"job {', '.join(map(str, jobs))}"
        color = ACCENT if is_best else index if few else QUIET
        curve, deviation = _mean(found)
        if len(found) > 1 and color != QUIET:
            edge = {"x": curve.iterations, "mode": "lines", "line": {"width": 0, "color": color}, "hoverinfo": "skip"}
            edge["showlegend"] = False
            traces += [
                edge | {"y": curve.values - deviation},
                edge | {"y": curve.values + deviation, "fill": "tonexty"},
            ]
        name = (label if few else "") or text
        one = trace(curve, f"best: {name}" if is_best else name, color=color, is_thin=color == QUIET)
        one |= {"hovertemplate": f"{text}: {label}<br>iteration %{{x}}: %{{y:.4g}}<extra></extra>"}
        if color == QUIET:
            one |= {"opacity": max(0.1, min(0.5, 20 / len(lines))), "showlegend": False}
        traces.append(one)
    return traces


def _mean(found: list[Curve]) -> tuple[Curve, Any]:
    """Return the mean of curves, up to the iteration that all of them have reached, and their standard deviation."""
    if len(found) == 1:
        return found[0], None
    longest = max(found, key=lambda curve: len(curve.iterations))
    at = longest.iterations[longest.iterations <= min(curve.iterations[-1] for curve in found)]
    values = np.stack([np.interp(at, curve.iterations, curve.values) for curve in found])
    with np.errstate(all="ignore"):  # a loss may be infinite
        return Curve(at, values.mean(axis=0)), values.std(axis=0, ddof=1)


def _failures(directory: SweepDirectory, found: Results) -> Iterator[Html]:
    """Yield the errors of failed jobs, and the last lines of their logs."""
    failed = [row for row in found.rows if row.error and row.status in ("failed", "interrupted")]
    for row in failed[:_FAILURES]:
        heading = f"{directory.name(row.job)}: {row.error}".partition("\n")[0]
        text = f"{row.error}\n\n{end_of(directory.folder(row.job) / LOG, _LINES)}"
        yield element("details", element("summary", heading), element("pre", text))
    if len(failed) > _FAILURES:
        yield note(f"and {len(failed) - _FAILURES:,} other jobs, see the table")
