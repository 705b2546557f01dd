"""The results of a sweep in the terminal."""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING, Any

from hydraloop.errors import printable
from hydraloop.files.environment import shown
from hydraloop.files.result import NO_CHECKPOINT
from hydraloop.files.terminal import brief, duration, number
from hydraloop.sweeps import results
from hydraloop.sweeps.results import Group, Results, SearchResults
from hydraloop.sweeps.sweep_directory import LONGEST, SweepDirectory
from hydraloop.tracking.run_description import short_keys

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

log = logging.getLogger(__name__)

_MOST = 40
"""Rows of a table. More do not fit on a screen."""
_WIDE = 1000
"""Columns of an output that is no terminal, so that no text is cut."""
_CUT = ("checkpoint", "reason")
"""Columns that are cut first in a narrow terminal."""
_STYLES = {"failed": "red", "interrupted": "yellow", "running": "cyan"}


def show(directory: SweepDirectory) -> None:
    """Write the files with results, and print tables of the jobs and averages, and the best job.

    If a file cannot be written, because the disk is full, a warning says so.
    """
    found = results.collect(directory)
    try:
        results.write(directory, found)
    except OSError as error:
        log.warning("%s and %s cannot be written: %s", results.CSV, results.JSON, error.strerror)
    console = new_console()
    counts = ", ".join(f"{count:,} {name}" for name, count in Counter(row.status for row in found.rows).items())
    jobs = directory.description.jobs
    title = "" if jobs.search is None else f"{jobs.title(len(found.rows))}: "
    console.print(f"{shown(directory.path)}: {title}{counts}")
    console.print(jobs_table(found))
    if len(found.rows) > _MOST:
        console.print(f"and {len(found.rows) - _MOST} other jobs, see {shown(directory.path / results.CSV)}")
    if found.average is not None:
        console.print(averages_table(found))
    if found.search is not None and found.search.pareto:
        console.print(pareto_table(found, found.search))
    if found.best is not None:
        console.print(best_lines(directory, found), soft_wrap=True)
    if found.search is not None and found.search.importance is not None:
        shares = ", ".join(f"{key} {share:.2f}" for key, share in found.search.importance.items())
        console.print(f"importance (PED-ANOVA, 1 in all): {shares}", soft_wrap=True)


def new_console() -> Console:
    """Return a console for text of the sweep's files: `hooks=[ema]` is no markup, and nothing controls the terminal."""
    from rich.console import Console

    class Printable(Console):
        def render_str(self, text: str, **options: Any) -> Text:
            return super().render_str(printable(text), **options)

    console = Printable(markup=False, emoji=False, highlight=False)
    if not console.is_terminal:
        console.width = _WIDE
    return console


def jobs_table(found: Results, most: int = _MOST) -> Table:
    """Return a table of `most` jobs, the best first."""
    short = short_keys(found.keys)
    others = [] if found.search is None else list(found.search.objectives)[1:]
    reasons = [line((row.error or row.reason or "").partition("\n")[0]) for row in found.rows[:most]]
    columns = ["status", found.metric or "value", *others, "step", "time", "checkpoint"]
    if any(reasons):
        columns.append("reason")
    table = new_table("job", *short.values(), *columns)
    for row, reason in zip(found.rows[:most], reasons, strict=True):
        value = "" if row.value is None else number(row.value)
        if value and row.metric != found.metric:
            value += f" ({row.metric})"
        cells: list[str | Text] = [
            str(row.job),
            *(brief(row.swept.get(key, "")) for key in found.keys),
            row.status,
            value,
        ]
        cells += [number(row.objectives.get(name, "")) for name in others]
        cells += ["" if row.step is None else f"{row.step:,}", duration(row.seconds) if row.seconds else ""]
        cells.append(line(row.checkpoint or ""))
        if any(reasons):
            cells.append(reason)
        table.add_row(*cells, style=_STYLES.get(row.status, ""))
    return table


def averages_table(found: Results, most: int = _MOST) -> Table:
    """Return a table of `most` averages, the best first."""
    keys = [key for key in found.keys if key != found.average]
    short = short_keys(keys)
    metric = found.metric or "value"
    table = new_table(*short.values(), "jobs", f"mean {metric}", "sd", title=f"averages over {found.average}")
    for group in found.groups[:most]:
        jobs = " of ".join(map(str, dict.fromkeys([len(group.values), len(group.jobs)])))
        cells = [*(brief(group.swept.get(key, "")) for key in keys), jobs]
        cells += ["" if value is None else number(value) for value in (group.mean, group.deviation)]
        table.add_row(*cells)
    return table


def pareto_table(found: Results, search: SearchResults) -> Table:
    """Return a table of trials that no other trial dominates, the best by the first objective at first."""
    keys = [key for key in found.keys if key != found.average]
    table = new_table("job", *short_keys(keys).values(), *search.objectives, title="Pareto front")
    swept = {row.job: row.swept for row in found.rows}
    for point in search.pareto[:_MOST]:
        cells = [brief(swept[point.jobs[0]].get(key, "")) for key in keys]
        table.add_row(", ".join(map(str, point.jobs)), *cells, *map(number, point.values.values()))
    return table


def new_table(*headers: str, title: str | None = None) -> Table:
    """Return a table without lines. In a narrow terminal, its least important columns are cut first."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold", title=title, title_justify="left", title_style="bold")
    for header in headers:
        table.add_column(header, no_wrap=header not in _CUT, overflow="ellipsis")
    return table


def line(text: str) -> Text:
    """Return a line that is cut if the terminal is narrow."""
    from rich.text import Text

    return Text(printable(text), no_wrap=True, overflow="ellipsis")


def best_lines(directory: SweepDirectory, found: Results) -> str:
    """Return the best job or average, and the command that runs it again."""
    command, best = results.rerun_command(directory, *found.best_jobs), found.best
    if isinstance(best, Group):
        count = f"{len(best.values)} of {len(best.jobs)} jobs"
        swept = "".join(f"{key}={brief(value)}, " for key, value in best.swept.items())
        text = f"{swept}mean {found.metric} {number(best.mean)} over {count}"
    else:
        assert best is not None
        note = NO_CHECKPOINT if best.checkpoint is None else ""
        text = f"job {best.job}, {best.metric} {number(best.value)}{note}"
    if len(command) > LONGEST:
        return f"best: {text}; the command that runs it again is in {results.JSON}"
    return f"best: {text}; it runs again with\n  {command}"
