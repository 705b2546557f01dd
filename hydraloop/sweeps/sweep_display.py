"""What the terminal shows of a running sweep: a live table, or a line for each start and end of a job."""

from __future__ import annotations

import logging
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, get_args

from hydraloop.files.environment import shown
from hydraloop.files.error_reports import failed_jobs
from hydraloop.files.metrics_log import FILENAME, Record, read_end
from hydraloop.files.result import NO_CHECKPOINT
from hydraloop.files.terminal import brief, clock, number
from hydraloop.sweeps import job_states, results_table
from hydraloop.sweeps.controller import Controller, Watcher
from hydraloop.sweeps.job_states import JobState, State
from hydraloop.sweeps.results import LAST, rank
from hydraloop.sweeps.results_table import line, new_console, new_table
from hydraloop.sweeps.search import Rule
from hydraloop.sweeps.search_history import measure
from hydraloop.sweeps.sweep_directory import SweepDirectory
from hydraloop.tracking.run_description import short_keys

if TYPE_CHECKING:
    from rich.console import Console, Group
    from rich.table import Table

_TAIL = 4096
"""Bytes of a record log that are read. A record has about 200."""


@dataclass(slots=True)
class RunningJob:
    """A job that runs."""

    state: JobState
    iteration: int = 0
    """Completed iterations at the last record."""
    loss: str = ""
    metric: str = ""
    """The monitored metric at the last validation, with its name."""
    until: float | None = None
    """When it ends, in seconds since 1970, as its last record estimates."""

    def read_records(self, directory: SweepDirectory, monitored: str | None) -> None:
        """Read the last records of the job. Takes 0.1 ms."""
        log = directory.run_dir(self.state) / FILENAME
        try:
            records = read_end(log, _TAIL)
        except OSError:
            return
        for record in records:
            self.iteration = record.iteration
            if record.mode == "train":
                self.loss = _shown(record, "loss")
                is_of_attempt = record.timestamp >= (self.state.began or 0.0)
                self.until = (
                    record.timestamp + record.values["eta"] if is_of_attempt and "eta" in record.values else None
                )
            elif record.mode == "val":
                first = next(iter(record.values), "")
                self.metric = _shown(record, monitored if monitored and monitored in record.values else first)


@dataclass
class Progress:
    """The progress of a sweep."""

    directory: SweepDirectory
    states: dict[int, State] = field(default_factory=dict)
    """Of each job."""
    running: dict[int, RunningJob] = field(default_factory=dict)
    best: JobState | None = None
    """The best job of those that have ended, with the first objective as its metric."""
    _seconds: list[float] = field(default_factory=list)
    """The seconds of each job that has finished."""

    @classmethod
    def of(cls, directory: SweepDirectory, states: Iterable[JobState]) -> Progress:
        """Return the progress of a sweep."""
        made = cls(directory)
        for state in states:
            made.started(state) if state.state == "running" else made.ended(state)
        return made

    def started(self, state: JobState) -> None:
        """Note that a job runs."""
        self.states[state.number] = "running"
        self.running[state.number] = RunningJob(state)

    def ended(self, state: JobState) -> None:
        """Note the state of a job that does not run, or not here."""
        self.states[state.number] = state.state
        self.running.pop(state.number, None)
        if state.state in ("finished", "stopped"):
            self._seconds.append(state.seconds)
            if reached := self.reached(state):
                name, value = next(iter(reached.items()))
                state = replace(state, metric=name, value=value, rule=self._objectives.get(name, state.rule))
            best, place = self.best or state, rank(state.value, state.rule)
            is_better = place < rank(best.value, best.rule) or self.best is None
            if place != LAST and state.metric == best.metric and is_better:
                self.best = state

    @property
    def _objectives(self) -> Mapping[str, Rule]:
        """`sweep.objectives`. Empty: the metric that each job monitors."""
        search = self.directory.description.jobs.search
        return {} if search is None else search.objectives

    def reached(self, state: JobState) -> dict[str, float]:
        """Return the objectives of a job that has ended; empty if it has none."""
        search = self.directory.description.jobs.search
        if search is not None and search.objectives:
            found = measure(state, self.directory.run_dir(state), search)
            return {} if found.values is None else dict(zip(found.metrics, found.values, strict=True))
        return {} if state.metric is None or state.value is None else {state.metric: state.value}

    def read_records(self) -> None:
        """Read the last records of the running jobs."""
        monitored = next(iter(self._objectives), None if self.best is None else self.best.metric)
        for job in self.running.values():
            job.read_records(self.directory, monitored)

    def seconds_left(self) -> float | None:
        """Estimate the time until all jobs have ended; None if none has finished yet, or nothing runs."""
        if not self._seconds or not self.running:
            return None
        left = sum(state in ("queued", "running", "interrupted") for state in self.states.values())
        return left * sum(self._seconds) / len(self._seconds) / len(self.running)


def _shown(record: Record, name: str) -> str:
    """Return a value as `loss 0.1234`; empty without the value."""
    return f"{name} {number(record.values[name])}" if name in record.values else ""


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
        left, command = sum(not state.is_over for state in found), directory.resume_command(found)
        log.info("the sweep %s. Jobs that are not over: %d of %d. Continue:\n  %s", why, left, count, command)
    if failed := [directory.name(state.number) for state in controller.failed]:
        interrupted = sum(state.state == "interrupted" for state in controller.failed)
        log.error("%s", failed_jobs(failed, count, interrupted))


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
    if best is not None and (jobs.search is None or len(jobs.search.objectives) < 2):
        swept = brief(" ".join(jobs.swept_lines(directory.lines(best))))
        note = NO_CHECKPOINT if best.checkpoint is None else ""
        lines.append(f"best: job {best.number}, {best.metric} {number(best.value)}{note} ({swept})")
    return lines
