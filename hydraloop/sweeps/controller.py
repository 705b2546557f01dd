"""Controller: starts the jobs of a sweep, retries them, ends some early, and alone writes the state of each job."""

from __future__ import annotations

import logging
import shlex
import shutil
import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Protocol

from hydraloop.errors import UserError
from hydraloop.files import lock
from hydraloop.files.result import describe
from hydraloop.files.secrets import mask_overrides, mask_text
from hydraloop.launch.exit import REQUEUE
from hydraloop.sweeps import job_states
from hydraloop.sweeps.executors.executor import Ended, Executor, Request
from hydraloop.sweeps.executors.gpus import Shares
from hydraloop.sweeps.job_directories import JobDirectories
from hydraloop.sweeps.job_failures import FailedBuilds, Retries, was_built
from hydraloop.sweeps.job_source import Job, Source
from hydraloop.sweeps.job_states import REQUEST, JobState
from hydraloop.sweeps.signals import Signals
from hydraloop.sweeps.sweep_directory import SweepDirectory


class Watcher(Protocol):
    """Shows the user what happens."""

    def started(self, state: JobState) -> None:
        """Called when a job was started, with its state."""

    def ended(self, state: JobState) -> None:
        """Called when a job has ended, also when it is retried."""

    def update(self) -> None:
        """Called several times a second."""


log = logging.getLogger(__name__)

_POLL = 0.2
"""Seconds for which the executor waits for the end of a job."""
_CHECK_INTERVAL = 1.0
"""Seconds between two checks of the locks of jobs whose end no executor reports. A check opens a file for each job."""


@dataclass
class _RunningJob:
    """A job that the executor of this controller has."""

    state: JobState
    """As it was written at the start of the attempt."""
    prune_reason: str | None = None
    """Why the job was sent SIGTERM before its end; None if it was not."""
    launcher_end: Ended | None = None
    """How the launcher of the job has ended, while a rank still has the lock of the run directory."""


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
    """Whether no job starts after one has failed."""
    retry_failed: bool = False
    """Whether jobs run that were started by an earlier controller and have failed."""
    slurm_restarts_it: bool = False
    """Whether Slurm restarts this controller: after a signal, it exits at once, and its jobs continue."""

    final_states: dict[int, JobState] = field(default_factory=dict)
    """The states of jobs that this controller does not start any more."""
    signals: Signals = field(default_factory=Signals)
    problem: UserError | None = None
    """Why no further job can be started or recorded."""
    _jobs: dict[int, Job] = field(default_factory=dict)
    """The jobs that the source has named, until their states are final."""
    _retry_queue: deque[Job] = field(default_factory=deque)
    _running: dict[int, _RunningJob] = field(default_factory=dict)
    _orphans: dict[int, JobState] = field(default_factory=dict)
    """Jobs whose controller was killed, while their processes save and end."""
    _failed_builds: FailedBuilds = field(default_factory=FailedBuilds)
    _has_failed: bool = False
    _checked_at: float = 0.0

    def __post_init__(self) -> None:
        self._retries = Retries(self.max_retries)
        adopted = self.executor.adopt()
        for state in self.directory.states():
            # The scheduler has the job of an earlier controller, in its queue or on a machine.
            if state.number in adopted and not state.is_over:
                running = replace(state, state="running", error=None, reason=None)
                self._running[state.number] = _RunningJob(running)
                self._write(running)
            elif state.state != "running":
                self._add_earlier(state)
            # The controller of the job was killed. A second process in the same directory would be refused.
            elif (process := self._process_of(state)) is not None:
                self._orphans[state.number] = state
                log.warning("job %d still saves, in process %d on %s", state.number, process.pid, process.host)
            # The process of the job was killed with its controller, and nobody has written how the job has ended.
            else:
                self._add_earlier(self._write_end(state, code=None))

    def _add_earlier(self, state: JobState) -> None:
        """Tell the source that a job of an earlier controller is over or paused. Otherwise, the source names it."""
        if not self._continues(state):
            self.final_states[state.number] = state
            self.source.job_ended(state)
        elif state.state == "paused":
            self.source.job_ended(state)

    def _continues(self, state: JobState) -> bool:
        """Return whether this controller starts another attempt of a job that an earlier controller has started."""
        return not state.is_over or (self.retry_failed and state.state == "failed")

    # The loop. -------------------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Run all jobs that are not over."""
        with self.signals.caught():
            while not (self.slurm_restarts_it and self.signals.received):
                self._check_locks()
                self._start_jobs()
                self._end_jobs_early()
                if not self._waits_for_jobs:
                    if self._no_job_can_be_built:
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
        """Whether the loop continues. The processes of orphans end without this controller."""
        return bool(self._running) or (bool(self._orphans) and not self._is_stopping)

    @property
    def _is_stopping(self) -> bool:
        """Whether no job is started, retried or pruned any more."""
        return self.signals.received is not None or self.problem is not None

    @property
    def _starts_no_job(self) -> bool:
        return self._is_stopping or (self._has_failed and self.stop_on_failure) or self._no_job_can_be_built

    @property
    def _no_job_can_be_built(self) -> bool:
        """Whether two jobs have failed alike while they were built, and no job was built. Then the others would fail.

        A running job may still be built. No other job starts before that or before its end.
        """
        if not self._failed_builds.are_alike:
            return False
        running = (job.state for job in self._running.values())
        known = chain(self.final_states.values(), running, self._orphans.values())
        return not any(was_built(self.directory.run_dir(state)) for state in known)

    def _forward_signal(self) -> None:
        """Send the signal that this process has received to all running jobs."""
        if self.slurm_restarts_it or (sign := self.signals.to_forward()) is None:
            return
        for number in self._running:
            self.executor.cancel(number, sign)

    def _check_locks(self) -> None:
        """Once a second, look for the end of processes that no executor reports: they have released their lock."""
        if time.monotonic() < self._checked_at + _CHECK_INTERVAL:
            return
        for job in list(self._running.values()):
            if job.launcher_end is not None:
                self._process_ended(job.launcher_end)
        for state in list(self._orphans.values()):
            if self._process_of(state) is None:
                self._orphan_ended(state)
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
        has_gpus = slots is None or slots.are_free
        return not self._starts_no_job and len(self._running) < self.shares.workers and has_gpus

    def _next_job(self) -> Job | None:
        """Return a job to retry, else the next one of the source; None if no job can start now."""
        if self._retry_queue:
            return self._retry_queue.popleft()
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
            state = replace(before, state="failed", attempts=before.attempts + 1, error=mask_text(describe(error)))
            self._write(state)
        if state.state != "running":
            self._finish(state)
            return

        running = self._running[number] = _RunningJob(state)
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
            self._attempt_ended(running, Ended(number, REQUEUE))
            return
        self.watcher.started(state)

    def _end_of_damaged(self, before: JobState, run_dir: str) -> JobState | None:
        """Return the end of a job whose `job.json` was damaged, by its `result.json`; None if it is not over.

        The name of its run directory was in the damaged file.
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

        Other rules that end a running job belong here. Example: send SIGTERM to a silent job, which has written no
        record for an hour, and let `_write_end` write that it has failed.
        """
        if self._is_stopping:
            return
        unwanted: dict[int, str] = {}
        with self._errors_of_source():
            unwanted.update(self.source.jobs_to_prune(job.state for job in self._running.values()))
        for number, reason in unwanted.items():
            running = self._running.get(number)
            # A running job saves and ends, as after a preemption. Then its state is written, with the reason.
            if running is not None:
                if running.prune_reason is None:
                    running.prune_reason = reason
                    self.executor.cancel(number, signal.SIGTERM)
            elif number not in self._orphans:
                state = job_states.pruned(self.directory.state(number), reason)
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
        self._attempt_ended(running, ended)

    def _attempt_ended(self, running: _RunningJob, ended: Ended) -> None:
        """Write how an attempt has ended. Then retry the job, or make its state final."""
        number = ended.number
        del self._running[number]
        if self.shares.slots is not None:
            self.shares.slots.give(number)
        state = self._write_end(running.state, ended.code, running.prune_reason)
        if not self._starts_no_job and self._retries.use(ended, state, running.state.iterations):
            self._retry(state)
            self.watcher.ended(state)
        else:
            self._finish(state)

    def _orphan_ended(self, running: JobState) -> None:
        """Write the end of a job whose controller was killed, and start its next attempt if it continues."""
        del self._orphans[running.number]
        state = self._write_end(running, code=None)
        if state.state != "paused" and self._continues(state):
            self._retry(state)
        else:
            self._finish(state)

    def _retry(self, state: JobState) -> None:
        """Queue a job for another attempt. A job that the source has not named yet is not queued: the source will."""
        if state.number in self._jobs:
            self._retry_queue.append(self._jobs[state.number])

    def _finish(self, state: JobState) -> None:
        """Make a state final: this controller does not start the job any more."""
        self._has_failed = self._has_failed or state.state in ("failed", "interrupted")
        self._failed_builds.add(state, self.directory.run_dir(state))
        self.final_states[state.number] = state
        self._jobs.pop(state.number, None)
        self.source.job_ended(state)
        self.watcher.ended(state)

    def _interrupt_failed_builds(self) -> None:
        """Let a resumed sweep run the jobs that could not be built, and the jobs that were pruned with them."""
        for state in list(self.final_states.values()):
            if state.state == "pruned" or state.number in self._failed_builds.states:
                del self.final_states[state.number]
                self._write(job_states.not_built(state))
        self.problem = self.problem or UserError(
            "the first jobs have failed with the same error while they were built, so no other job was started",
            remedy=f"Correct it or leave out these jobs, and continue the sweep: {self._resume_option}",
        )

    def _write_end(self, running: JobState, code: int | None, prune_reason: str | None = None) -> JobState:
        """Write the state of a job that has ended, and return it.

        Args:
            code: the exit code of its process; None if unknown.
            prune_reason: why the source has ended it.
        """
        run_dir = self.directory.run_dir(running)
        folder = self.directory.folder(running.number)
        state = job_states.ended_from_result(running, run_dir)
        is_in_result = state is not None and prune_reason is None
        if state is None:
            state = job_states.ended_without_result(running, folder, run_dir, code)
        if prune_reason is not None:
            state = job_states.pruned(state, prune_reason)
        self._write(state, flush=not is_in_result)  # otherwise no other file has it
        with suppress(OSError):
            Path(folder, REQUEST).unlink(missing_ok=True)
        return state

    # The outcome of the sweep. ---------------------------------------------------------------------------------------

    @property
    def unfinished(self) -> list[int]:
        """The numbers of jobs that are not over."""
        over = {number for number, state in self.final_states.items() if state.is_over}
        return [number for number in self.source.numbers if number not in over]

    @property
    def failed(self) -> list[JobState]:
        """The jobs that have failed or were killed, by number."""
        kinds = ("failed", "interrupted") if self.signals.received is None else ("failed",)
        return [state for _, state in sorted(self.final_states.items()) if state.state in kinds]

    @property
    def exit_code(self) -> int:
        """The exit code of the command."""
        if self.signals.received is not None:
            return REQUEUE if self.slurm_restarts_it else self.signals.exit_code
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
