"""What the terminal says about the jobs of a sweep: a line for each start and end, and a last line."""

from __future__ import annotations

import logging
from contextlib import suppress

from hydraloop.files.environment import shown
from hydraloop.files.error_reports import failed_jobs
from hydraloop.files.terminal import clock
from hydraloop.sweeps import job_states, results_table
from hydraloop.sweeps.controller import Controller
from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.progress import Progress
from hydraloop.sweeps.sweep_directory import SweepDirectory

log = logging.getLogger(__name__)


class JobLines:
    """Prints a line when a job starts, and when it ends. What the job prints is in its log."""

    def __init__(self, directory: SweepDirectory) -> None:
        self._directory = directory
        self.progress = Progress.of(directory, directory.states())

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
            log.error("%s: %s\n  %s", name, state.error, path)
        elif state.state == "interrupted":
            reason = state.reason or state.error or ""
            log.info("%s %s", name, reason if reason.startswith("interrupted") else f"interrupted: {reason}")
        else:
            value = "" if state.value is None else f": {state.metric} {state.value:.4g}"
            left = self.progress.seconds_left()
            rest = "" if left is None else f"; about {clock(left)} left for all jobs"
            log.info("%s %s%s (%.0f s%s)", name, state.state, value, state.seconds, rest)

    def update(self) -> None:
        """Print nothing."""


def print_end(controller: Controller) -> None:
    """Print the results, how to continue a sweep that is not over, and which jobs have failed."""
    directory = controller.directory
    count = directory.count
    if any(state.is_over for state in controller.final_states.values()):
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
