"""Controller: starts the jobs of a sweep, retries them, ends some early, and writes how each of them has ended."""

from __future__ import annotations

import logging
import shlex
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

from hydraloop.errors import UserError
from hydraloop.files import lock
from hydraloop.files.result import describe
from hydraloop.files.secrets import mask_overrides, mask_text
from hydraloop.launch.exit import REQUEUE
from hydraloop.sweeps import job_states
from hydraloop.sweeps.executors.executor import Cause, Ended, Executor, Request
from hydraloop.sweeps.executors.gpus import Shares
from hydraloop.sweeps.job_directories import JobDirectories
from hydraloop.sweeps.job_failures import Builds, next_attempt
from hydraloop.sweeps.job_source import Job, Source
from hydraloop.sweeps.job_states import REQUEST, JobState
from hydraloop.sweeps.signals import Signals
from hydraloop.sweeps.sweep_directory import SweepDirectory


class Watcher(Protocol):
    """Shows the user what happens."""

    def started(self, state: JobState) -> None:
        """Called when a job was started, with its state."""

    def ended(self, state: JobState) -> None:
        """Called when a job has ended, also when it is retried, and for a job that ends before it was started."""

    def update(self) -> None:
        """Called several times a second."""


log = logging.getLogger(__name__)

_POLL = 0.2
"""Seconds for which the executor waits for the end of a job."""
_CHECK_INTERVAL = 1.0
"""Seconds between two checks of the locks of processes whose end no executor reports. Each check opens a file."""


@dataclass
class _RunningJob:
    """A job that the executor of this controller has."""

    state: JobState
    """As it was written at the start of the attempt."""
    prune_reason: str | None = None
    """Why the job was sent SIGTERM before its end; None if it was not."""
    launcher_end: Ended | None = None
    """How the process that the executor has started has ended, while a rank that it has started still has the lock."""


@dataclass
class Controller:
    """Runs the jobs of a sweep. Only the process that has the lock of the directory makes one.

    `run` is the loop. The source or the retry queue names a job, the executor runs it, and this class writes how the
    job has ended. Then the job is queued for a retry, or its state is final.
    """

    directory: SweepDirectory
    executor: Executor
    source: Source
    shares: Shares
    watcher: Watcher
    job_directories: JobDirectories
    max_retries: int = 0
    """`sweep.max_retries`, of each job."""
    stop_on_failure: bool = False
    """Whether no job starts after one has failed, or was interrupted, and is not retried."""
    retry_failed: bool = False
    """Whether jobs run that were started by an earlier controller and have failed."""
    jobs_outlive_controller: bool = False
    """Whether the jobs continue after a signal, and this controller exits at once. Slurm restarts it."""

    ended_states: dict[int, JobState] = field(default_factory=dict)
    """The states of jobs that have ended and are not retried. A paused job of a search may start again."""
    signals: Signals = field(default_factory=Signals)
    problem: UserError | None = None
    """Why no further job can be started or recorded."""
    _jobs: dict[int, Job] = field(default_factory=dict)
    """The jobs that the source has named, until their states are final."""
    _retry_queue: dict[int, Job] = field(default_factory=dict)
    _running: dict[int, _RunningJob] = field(default_factory=dict)
    _orphans: dict[int, JobState] = field(default_factory=dict)
    """Running jobs whose controller was killed. Their processes have noticed that, and save and end."""
    _builds: Builds = field(default_factory=Builds)
    _has_failed: bool = False
    _checked_at: float = 0.0

    def __post_init__(self) -> None:
        adopted = self.executor.adopt()
        for state in self.directory.states():
            if state.attempts:
                self._builds.run_dirs.add(self.directory.run_dir(state))
            if state.number in adopted and not state.is_over:
                # The scheduler has the job of an earlier controller, in its queue or on a machine.
                running = replace(state, state="running", error=None, reason=None)
                self._running[state.number] = _RunningJob(running)
                self._write(running)
            elif state.state != "running":
                self._add_earlier(state)
            elif (process := self._process_of(state)) is not None:
                # The controller of the job was killed. A second process in the same directory would be refused.
                self._orphans[state.number] = state
                log.warning(
                    "job %d still saves, in process %d on %s, and the sweep waits for it\n"
                    "  If the process hangs, run `kill -9 %d` on %s. The sweep then continues the job.",
                    state.number,
                    process.pid,
                    process.host,
                    process.pid,
                    process.host,
                )
            else:
                # The process of the job was killed with its controller, and nobody has written how the job has ended.
                ended, retried = self._write_end(state, _lost(state))
                self._add_earlier(retried or ended)

    def _add_earlier(self, state: JobState) -> None:
        """Tell the source that a job of an earlier controller is over or paused. It names all other jobs."""
        runs_again = not state.is_over or (self.retry_failed and state.state == "failed")
        if not runs_again:
            self.ended_states[state.number] = state
        if not runs_again or state.state == "paused":
            self.source.job_ended(state)

    # The loop. -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all jobs that are not over."""
        with self.signals.caught():
            while not (self.jobs_outlive_controller and self.signals.received):
                self._check_locks()
                self._start_jobs()
                self._end_jobs_early()
                if not self._waits_for_jobs:
                    if self._builds.all_fail:
                        self._interrupt_failed_builds()
                    return
                for ended in self.executor.poll(_POLL):
                    if self.signals.received is not None:
                        self.signals.exit_codes.add(ended.code)
                    self._process_ended(ended)
                self._forward_signal()
                self.watcher.update()

    @property
    def _waits_for_jobs(self) -> bool:
        """Whether the loop continues. A controller that stops does not wait for orphans: they end without it."""
        return bool(self._running) or (bool(self._orphans) and not self._is_stopping)

    @property
    def _is_stopping(self) -> bool:
        """Whether no job is started, retried or pruned any more."""
        return self.signals.received is not None or self.problem is not None

    @property
    def _starts_jobs(self) -> bool:
        """Whether jobs may start, also for a retry. Those that run continue, also if this is False."""
        is_over = self._has_failed and self.stop_on_failure
        return not self._is_stopping and not is_over and not self._builds.all_fail

    def _forward_signal(self) -> None:
        """Send the signal that this process has received to all running jobs."""
        if self.jobs_outlive_controller or (sign := self.signals.to_forward()) is None:
            return
        for number in self._running:
            self.executor.cancel(number, sign)

    def _check_locks(self) -> None:
        """Once a second, look for processes that have released their lock. No executor reports the end of these."""
        if time.monotonic() < self._checked_at + _CHECK_INTERVAL:
            return
        for job in list(self._running.values()):
            if job.launcher_end is not None:
                self._process_ended(job.launcher_end)
        for state in list(self._orphans.values()):
            if self._process_of(state) is None:
                self._attempt_ended(state, _lost(state))
        self._checked_at = time.monotonic()

    def _process_of(self, state: JobState) -> lock.Holder | None:
        """Return the process that trains in the directory of a job; None if the directory is not locked."""
        return lock.holder(self.directory.run_dir(state))

    # Jobs start. -----------------------------------------------------------------------------------------------------

    def _start_jobs(self) -> None:
        """Start jobs while there is room."""
        while self._has_room and (job := self._next_job()) is not None:
            self._start(job)

    @property
    def _has_room(self) -> bool:
        slots = self.shares.slots
        has_gpus = slots is None or (slots.are_free and not self._orphans)  # it is not known which GPUs orphans use
        return self._starts_jobs and len(self._running) + len(self._orphans) < self.shares.workers and has_gpus

    def _next_job(self) -> Job | None:
        """Return a job to retry, else the next one of the source; None if no job can start now."""
        if self._retry_queue:
            return self._retry_queue.pop(next(iter(self._retry_queue)))
        with self._errors_of_source():
            while (job := self.source.next_job()) is not None:
                self._jobs[job.number] = job
                if job.number not in self._running and job.number not in self._orphans:
                    return job
        return None

    def _start(self, job: Job) -> None:
        """Write that a job runs, then start its process.

        If this process is killed between the two, the next controller sees no process, and starts the job.
        """
        number = job.number
        before = self.directory.state(number)
        try:
            run_dir = self.job_directories.of(job, before)
            state = self._end_of_damaged(before, run_dir) or self._write_start(job, before, run_dir)
        except OSError as error:
            self._set_unwritable(error)
            return
        except UserError as error:  # a mistake in the overrides of this job
            attempts = before.attempts + 1
            state = replace(before, state="failed", attempts=attempts, error=mask_text(describe(error)), reason=None)
            self._write(state)
        if state.state != "running":
            self._finish(state)
            return

        self._running[number] = _RunningJob(state)
        self._builds.run_dirs.add(self.directory.run_dir(state))
        slots = self.shares.slots
        request = Request(
            number=number,
            lines=job.lines,
            folder=str(self.directory.folder(number)),
            run_dir=str(self.directory.run_dir(state)),
            attempt=state.attempts,
            gpus=None if slots is None else slots.take(number),
            threads=self.shares.threads,
        )
        try:
            self.executor.submit(request)
        except UserError as error:
            self.problem = error
            self._attempt_ended(state, Ended(number, REQUEUE))
            return
        self.watcher.started(state)

    def _end_of_damaged(self, before: JobState, run_dir: str) -> JobState | None:
        """Return the end of a job whose `job.json` was damaged, by its `result.json`; None if it is not over.

        A damaged file counts as one attempt, and does not name the run directory.
        """
        if not before.attempts or run_dir == before.directory:
            return None
        state = job_states.ended_from_result(replace(before, directory=run_dir), self.directory.path / run_dir)
        if state is None or not state.is_over:
            return None
        self.directory.write(state)
        return state

    def _write_start(self, job: Job, before: JobState, run_dir: str) -> JobState:
        """Write that a job runs, and return that state."""
        state = job_states.started(before, tuple(mask_overrides(job.lines)), self.directory.path, run_dir)
        self.directory.write(state, flush=state.params is not None)  # no other file has the values of a trial
        return state

    # Jobs end early. -------------------------------------------------------------------------------------------------

    def _end_jobs_early(self) -> None:
        """End the jobs that the source does not need any more.

        Jobs that end here become `pruned`. Another rule that ends running jobs belongs here, too. If its jobs get
        another state (a silent job fails), `_RunningJob` has to keep that state until the job has ended.
        """
        if self._is_stopping:
            return
        unwanted: dict[int, str] = {}
        with self._errors_of_source():
            unwanted.update(self.source.jobs_to_prune(job.state for job in self._running.values()))
        for number, reason in unwanted.items():
            running = self._running.get(number)
            if running is not None:
                # A running job saves and ends, as after a preemption. Then its state is written, with the reason.
                if running.prune_reason is None:
                    running.prune_reason = reason
                    self.executor.cancel(number, signal.SIGTERM)
            elif number not in self._orphans:
                state = job_states.pruned_if_open(self.directory.state(number), reason)
                self._write(state)
                self._finish(state)

    # Jobs end. -------------------------------------------------------------------------------------------------------

    def _process_ended(self, ended: Ended) -> None:
        """Handle the end of a process that the executor has started, unless the job has a rank that still runs."""
        running = self._running.get(ended.number)
        if running is None:  # Slurm still had the job, but its end was written by an earlier controller
            return
        if self._process_of(running.state) is not None:
            running.launcher_end = ended
            return
        self._attempt_ended(running.state, ended, running.prune_reason)

    def _attempt_ended(self, running: JobState, ended: Ended, prune_reason: str | None = None) -> None:
        """Write how an attempt has ended. Then queue the job for a retry, or note that it has ended.

        Args:
            running: the state of the job during the attempt.
            prune_reason: why the source has ended it.
        """
        self._running.pop(running.number, None)
        self._orphans.pop(running.number, None)
        if self.shares.slots is not None:
            self.shares.slots.give(running.number)
        state, retried = self._write_end(running, ended, prune_reason)
        if retried is None or not self._starts_jobs:
            self._finish(retried or state)
            return
        if (job := self._jobs.get(state.number)) is not None:  # otherwise, the source still names it
            self._retry_queue[state.number] = job
        self.watcher.ended(state)

    def _finish(self, state: JobState) -> None:
        """Note the end of a job that is not retried."""
        self._has_failed = self._has_failed or state.state in ("failed", "interrupted")
        self._builds.add_end(state, self.directory.run_dir(state))
        self.ended_states[state.number] = state
        self._jobs.pop(state.number, None)
        self._retry_queue.pop(state.number, None)
        self.source.job_ended(state)
        self.watcher.ended(state)

    def _interrupt_failed_builds(self) -> None:
        """Let a resumed sweep run the jobs that could not be built, and the jobs that were pruned with them."""
        for state in list(self.ended_states.values()):
            if state.state == "pruned" or state.number in self._builds.failed:
                del self.ended_states[state.number]
                self._write(job_states.not_built(state))
        self.problem = self.problem or UserError(
            "the first jobs have failed with the same error while they were built, so no other job was started",
            remedy=f"With other options, start a new sweep. After a change in code, continue: {self._resume_option}",
        )

    def _write_end(
        self, running: JobState, ended: Ended, prune_reason: str | None = None
    ) -> tuple[JobState, JobState | None]:
        """Write the state of a job after an attempt. This is the only place that decides about a retry.

        Returns:
            The state in which the attempt has ended; and the state that was written if the job is to be retried.
        """
        folder, run_dir = self.directory.folder(running.number), self.directory.run_dir(running)
        in_result = job_states.ended_from_result(running, run_dir)
        state = in_result or job_states.ended_without_result(running, folder, run_dir, ended.code)
        # A job that is interrupted while no job starts has used no retry. A resumed sweep continues it.
        is_counted = self._starts_jobs or state.state == "failed"
        retried = next_attempt(state, ended, running.iterations, self.max_retries) if is_counted else None
        if prune_reason is not None:
            state, retried = job_states.pruned_if_open(retried or state, prune_reason), None
        written = retried or state
        self._write(written, flush=written is not in_result)  # `result.json` is on the disk already
        with suppress(OSError):
            Path(folder, REQUEST).unlink(missing_ok=True)
        return state, retried

    # The outcome of the sweep. ---------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> list[int]:
        """The numbers of jobs that are not over."""
        over = {number for number, state in self.ended_states.items() if state.is_over}
        return [number for number in self.source.numbers if number not in over]

    @property
    def failed(self) -> list[JobState]:
        """The jobs that have failed, by number. Without a signal, also those that were interrupted and not retried."""
        kinds = ("failed", "interrupted") if self.signals.received is None else ("failed",)
        return [state for _, state in sorted(self.ended_states.items()) if state.state in kinds]

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self.signals.received is not None:
            return REQUEUE if self.jobs_outlive_controller else self.signals.exit_code
        return 1 if self.failed or self.problem is not None else 0

    # Why no further job starts. The first problem is reported. -------------------------------------------------------

    def _write(self, state: JobState, *, flush: bool = True) -> None:
        try:
            self.directory.write(state, flush=flush)
        except OSError as error:
            self._set_unwritable(error)

    def _set_unwritable(self, error: OSError) -> None:
        """Start no further job, because the state of a job could not be written."""
        path = self.directory.path
        free = shutil.disk_usage(path).free / 1e6
        why = error.strerror or str(error)
        self.problem = self.problem or UserError(
            f"the state of a job could not be written to {path}, where {free:.0f} MB are free: {why}",
            key="hydra.sweep.dir",
            remedy=f"Repair that, and continue the sweep: {self._resume_option}",
        )

    @property
    def _resume_option(self) -> str:
        return f"sweep.resume={shlex.quote(str(self.directory.path))}"

    @contextmanager
    def _errors_of_source(self) -> Iterator[None]:
        """In the body, the source decides. If it cannot, no further job starts."""
        try:
            yield
        except UserError as error:
            self.problem = self.problem or error
        except OSError as error:
            self.problem = self.problem or UserError(f"the next job cannot be chosen: {error}")


def _lost(state: JobState) -> Ended:
    """Return the end of a job whose controller was killed."""
    return Ended(state.number, None, Cause.LOST)
