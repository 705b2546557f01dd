"""The live table of a sweep in a terminal. It has no thread: it is drawn when the loop of the sweep asks for it."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, get_args

from hydraloop.files.terminal import brief, clock, number
from hydraloop.sweeps.controller import Watcher
from hydraloop.sweeps.job_states import JobState, State
from hydraloop.sweeps.progress import Progress
from hydraloop.sweeps.results_table import line, new_console, new_table
from hydraloop.tracking.run_description import short_keys

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

    from hydraloop.sweeps.job_lines import JobLines

_PERIOD = 1.0
"""Seconds between two updates."""
_BAR = 20
"""Columns of a progress bar."""


@contextmanager
def watching(lines: JobLines) -> Iterator[Watcher]:
    """Yield what shows a sweep: a live table in a terminal, otherwise `lines`.

    Above the table, `lines` print the jobs that end without a result. What is printed through `sys.stdout` appears
    there, too. The table is removed at the end.
    """
    console = new_console()
    if not console.is_terminal or console.is_dumb_terminal:
        yield lines
        return
    display = Display(lines, console)
    try:
        yield display
    finally:
        display.close()


class Display:
    """The live table.

    Args:
        lines: print jobs that end without a result.
        console: of a terminal.
    """

    def __init__(self, lines: JobLines, console: Console) -> None:
        from rich.live import Live

        self._lines, self._progress = lines, lines.progress
        self._began = time.time()
        self._next_update = 0.0
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            get_renderable=lambda: sweep_table(self._progress, time.time(), self._began),
            redirect_stderr=sys.stderr.isatty(),
        )
        self._live.start()

    def started(self, state: JobState) -> None:
        """Add a job."""
        self._progress.started(state)

    def ended(self, state: JobState) -> None:
        """Remove a job, and print why it has no result."""
        if state.state in ("failed", "interrupted"):
            self._lines.ended(state)
        else:
            self._progress.ended(state)

    def update(self) -> None:
        """Draw the table if it is time to. A terminal that was closed is not drawn to."""
        if time.monotonic() >= self._next_update:
            self._progress.read_records()
            with suppress(OSError):
                self._live.refresh()
            self._next_update = time.monotonic() + _PERIOD

    def close(self) -> None:
        """Remove the table."""
        with suppress(OSError):
            self._live.stop()


def sweep_table(progress: Progress, now: float, began: float) -> Group:
    """Return what is said of the sweep, and the table of running jobs, which is cut if the screen is too small.

    Args:
        now, began: in seconds since 1970.
    """
    from rich.console import Group

    return Group(*map(line, _summary(progress, now, began)), *([_jobs(progress, now)] if progress.running else []))


def _jobs(progress: Progress, now: float) -> Table:
    from rich.progress_bar import ProgressBar

    directory = progress.directory
    short = short_keys(directory.description.jobs.swept)
    table = new_table("job", *short.values(), "progress", "iteration", "last", "time", "left")
    table.columns[1 + len(short)].max_width = _BAR
    for job in sorted(progress.running.values(), key=lambda job: job.state.number):
        swept, spent = directory.swept(job.state), now - (job.state.began or now)
        left = None if job.until is None else max(0.0, job.until - now)
        table.add_row(
            str(job.state.number),
            *(brief(swept.get(key, "")) for key in short),
            ProgressBar(total=1 if left is None else spent + left, completed=0 if left is None else spent),
            f"{job.iteration:,}" if job.iteration else "starts",
            job.metric or job.loss,
            clock(spent),
            "" if left is None else clock(left),
        )
    return table


def _summary(progress: Progress, now: float, began: float) -> list[str]:
    """Return how far the sweep is, and its best job."""
    directory, jobs = progress.directory, progress.directory.description.jobs
    number_of, left = Counter(progress.states.values()), progress.seconds_left()
    counts = ", ".join(f"{number_of[name]:,} {name}" for name in get_args(State) if number_of[name])
    times = f"{clock(now - began)}" + ("" if left is None else f", about {clock(left)} left")
    lines = [f"{jobs.title(len(progress.states))}: {counts}; {times}"]
    best = progress.best
    if best is not None and (jobs.search is None or not jobs.search.objectives):
        swept = brief(" ".join(jobs.swept_lines(directory.lines(best))))
        lines.append(f"best: job {best.number}, {best.metric} {number(best.value)} ({swept})")
    return lines
