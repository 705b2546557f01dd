"""What the terminal shows of a running sweep: a live table, or a line for each start and end of a job."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, get_args

from hydraloop.files.environment import shown
from hydraloop.files.error_reports import failed_jobs
from hydraloop.files.terminal import brief, clock
from hydraloop.sweeps import job_states, results_table
from hydraloop.sweeps.controller import Controller, Watcher
from hydraloop.sweeps.job_states import JobState, State
from hydraloop.sweeps.progress import Progress
from hydraloop.sweeps.results_table import line, new_console, new_table
from hydraloop.sweeps.sweep_directory import SweepDirectory
from hydraloop.tracking.run_description import short_keys

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

log = logging.getLogger(__name__)


class JobLines:
    """Prints a line when a job starts, and when it ends. What the job prints is in its log."""

    def __init__(self, directory: SweepDirectory) -> None:
        self._directory = directory
        self.progress = Progress.of(directory, directory.states())
        self._errors = set[str | None]()
        """Errors that were printed."""

    def started(self, state: JobState) -> None:
        """Print that a job was started."""
        self.progress.started(state)
        log.info("%s %s", self._directory.name(state.number), "continues" if state.attempts > 1 else "started")

    def ended(self, state: JobState) -> None:
        """Print how a job has ended, an error without its traceback, and how long the others will take."""
        self.progress.ended(state)
        name = self._directory.name(state.number)
        if state.state == "failed":
            path = shown(self._directory.folder(state.number) / job_states.LOG)
            is_new = state.error not in self._errors
            self._errors.add(state.error)
            log.error("%s: %s\n  %s", name, state.error if is_new else "the same error as before", path)
        elif state.state == "interrupted":
            reason = state.reason or state.error or ""
            log.info("%s %s", name, reason if reason.startswith("interrupted") else f"interrupted: {reason}")
        else:
            said = [f"{metric} {value:.4g}" for metric, value in self.progress.reached(state).items()]
            said += [state.reason] if state.state == "pruned" and state.reason else []
            how = f": {', '.join(said)}" if said else ""
            left = self.progress.seconds_left()
            rest = "" if left is None else f"; about {clock(left)} left for all jobs"
            log.info("%s %s%s (%.0f s%s)", name, state.state, how, state.seconds, rest)

    def update(self) -> None:
        """Print nothing."""


def print_end(controller: Controller) -> None:
    """Print the results, how to continue a sweep that is not over, and which jobs have failed."""
    directory = controller.directory
    count = directory.count
    if any(state.is_over for state in controller.ended_states.values()):
        with suppress(OSError):  # a terminal that was closed
            results_table.show(directory)
    if controller.problem is not None:
        log.error("%s", controller.problem)
    if controller.unfinished:
        why = "was interrupted" if controller.signals.received else "has ended"
        found = directory.states()
        planned = max(directory.description.jobs.count, count)  # of a search, with the trials that have not begun
        left, command = planned - sum(state.is_over for state in found), directory.resume_command(found)
        log.info("the sweep %s. Jobs that are not over: %d of %d. Continue:\n  %s", why, left, planned, command)
    if failed := [directory.name(state.number) for state in controller.failed]:
        interrupted = sum(state.state == "interrupted" for state in controller.failed)
        log.error("%s", failed_jobs(failed, count, interrupted))


_PERIOD = 1.0
"""Seconds between two updates."""


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
    directory = progress.directory
    short = short_keys(directory.description.jobs.swept)
    table = new_table("job", *short.values(), "iteration", "last", "time", "left")
    for job in sorted(progress.running.values(), key=lambda job: job.state.number):
        swept, spent = directory.swept(job.state), now - (job.state.began or now)
        left = None if job.until is None else max(0.0, job.until - now)
        table.add_row(
            str(job.state.number),
            *(brief(swept.get(key, "")) for key in short),
            f"{job.iteration:,}" if job.iteration else "starts",
            job.metric or job.loss,
            clock(spent),
            "" if left is None else clock(left),
        )
    return table


def _summary(progress: Progress, now: float, began: float) -> list[str]:
    """Return how far the sweep is, and its best job."""
    jobs = progress.directory.description.jobs
    number_of, left = Counter(progress.states.values()), progress.seconds_left()
    counts = ", ".join(f"{number_of[name]:,} {name}" for name in get_args(State) if number_of[name])
    times = f"{clock(now - began)}" + ("" if left is None else f", about {clock(left)} left")
    return [f"{jobs.title(len(progress.states))}: {counts}; {times}", *progress.best_lines()]
