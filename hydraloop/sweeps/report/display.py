"""The live table of a sweep in a terminal. It has no thread: it is drawn when the loop of the sweep asks for it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TextIO

from hydraloop.engine.report.formats import brief, clock, number
from hydraloop.sweeps.controller.watcher import Watcher
from hydraloop.sweeps.current_states import current_states
from hydraloop.sweeps.report.progress import Progress, RunningJob
from hydraloop.sweeps.report.results_table import line, new_console, new_table
from hydraloop.sweeps.slurm import submissions
from hydraloop.sweeps.states import JobState, State
from hydraloop.tracking.run_description import short_keys

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table
    from rich.text import Text

    from hydraloop.sweeps.report.lines import Lines

_PERIOD = 0.1
"""Seconds between two updates at least."""
_ASK = 5.0
"""Seconds between two questions to Slurm while all jobs wait."""
_SHARE = 0.005
"""Of the CPU time while no job starts or ends: an update of 5 ms is followed by a pause of 1 s."""
_BAR = 20
"""Columns of a progress bar."""
_COUNTED: tuple[State, ...] = ("finished", "stopped", "failed", "pruned", "interrupted", "paused", "running", "queued")


@contextmanager
def watching(lines: Lines) -> Iterator[Watcher]:
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

    def __init__(self, lines: Lines, console: Console) -> None:
        from rich.live import Live

        self._lines, self._progress = lines, lines.progress
        self._began = time.time()
        self._drawn = self._due = 0.0
        self._live = Live(
            console=console,
            auto_refresh=False,
            transient=True,
            get_renderable=lambda: sweep_table(self._progress, time.time(), self._began, rows=console.height - 4),
            redirect_stderr=sys.stderr.isatty(),
        )
        _streams_in_forks.append((sys.stdout, sys.stderr))
        self._live.start()

    def started(self, state: JobState) -> None:
        """Add a job."""
        self._progress.started(state)
        self._due = self._drawn + _PERIOD

    def ended(self, state: JobState) -> None:
        """Remove a job, and print why it has no result."""
        self._due = self._drawn + _PERIOD
        if state.state in ("failed", "interrupted"):
            self._lines.ended(state)
        else:
            self._progress.ended(state)

    def update(self) -> None:
        """Draw the table if it is time to. A terminal that was closed is not drawn to."""
        if time.monotonic() < self._due:
            return
        began = time.process_time()
        self._progress.look()
        with suppress(OSError):
            self._live.refresh()
        self._drawn = time.monotonic()
        self._due = self._drawn + max(_PERIOD, (time.process_time() - began) / _SHARE)

    def close(self) -> None:
        """Remove the table."""
        with suppress(OSError):
            self._live.stop()
        _streams_in_forks.pop()


_streams_in_forks: list[tuple[TextIO, TextIO]] = []
"""The streams while a table is shown. A process that is forked then must not draw it."""


def _restore_streams() -> None:
    if _streams_in_forks:
        sys.stdout, sys.stderr = _streams_in_forks[0]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_streams)


def watch(lines: Lines) -> None:
    """Show a sweep that other processes run, until no controller and no job of it runs."""
    directory = lines.progress.directory
    known = {state.number: state for state in current_states(directory) if state.state != "running"}
    with watching(lines) as watcher:
        due = 0.0
        while True:
            if (began := time.monotonic()) >= due:
                is_over = directory.holder() is None
                states = current_states(directory)
                has_jobs = not all(state.is_over for state in states)
                is_left = is_over and has_jobs and submissions.jobs(directory.path) != {}  # in Slurm's queue
                for state in states:
                    before = known.get(state.number)
                    if before is None or (before.state, before.attempts) != (state.state, state.attempts):
                        known[state.number] = state
                        watcher.started(state) if state.state == "running" else watcher.ended(state)
                if is_over and not is_left and all(state.state != "running" for state in states):
                    return
                due = began + max(_ASK if is_left else 1.0, 50 * (time.monotonic() - began))
            watcher.update()
            time.sleep(0.2)


def sweep_table(progress: Progress, now: float, began: float, *, rows: int) -> Group:
    """Return the table of running jobs, and a line about the sweep.

    Args:
        now, began: in seconds since 1970.
        rows: of jobs that fit on the screen.
    """
    from rich.console import Group

    jobs = [progress.running[number] for number in sorted(progress.running)]
    rows = len(jobs) if len(jobs) <= rows else max(1, rows - 1)
    parts: list[Table | Text] = [_jobs(progress, jobs[:rows], now)] if jobs else []
    if len(jobs) > rows:
        parts.append(line(f"and {len(jobs) - rows} other jobs that run"))
    return Group(*parts, *map(line, _summary(progress, now, began)))


def _jobs(progress: Progress, jobs: Sequence[RunningJob], now: float) -> Table:
    from rich.progress_bar import ProgressBar

    directory = progress.directory
    short = short_keys(directory.description.jobs.swept)
    table = new_table("job", *short.values(), "progress", "iteration", "last", "time", "left")
    table.columns[1 + len(short)].max_width = _BAR
    for job in jobs:
        state, left = job.state, job.seconds_left(now, progress.usual)
        swept = directory.swept(state)
        spent = now - (state.began or now)
        table.add_row(
            str(state.number),
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
    number_of, directory = progress.counts, progress.directory
    title = directory.description.jobs.title(number_of.total())
    counts = [f"{number_of[name]:,} {name}" for name in _COUNTED if number_of[name] > 0]
    left = progress.seconds_left(now)
    times = f"{clock(now - began)}" + ("" if left is None else f", about {clock(left)} left")
    lines = [f"{title}: {', '.join(counts)}; {times}"]
    best, averaged, search = progress.best, directory.description.averaged, directory.description.jobs.search
    if best is not None and (search is None or not search.objectives):
        swept = brief(" ".join(directory.description.jobs.swept_lines(directory.lines(best))))
        later = "" if averaged is None else f", before results are averaged over {averaged}"
        lines.append(f"best: job {best.number}, {best.metric} {number(best.value)} ({swept}){later}")
    return lines
