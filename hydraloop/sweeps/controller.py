"""Controller: decides which job of a sweep starts, ends early or is retried. It alone writes the states of jobs."""

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
"""Seconds between two checks of the jobs whose processes still end."""


@dataclass
class Controller:
    """Runs the jobs of a sweep. Only the process that has the lock of the directory makes one.

    A job comes from the source, or from `_retry_queue`. While it runs, it is in `_running`. When it has ended, it is
    retried, or its state becomes final. Jobs of an earlier controller are in `_saving` until their processes end.
    """

    directory: SweepDirectory
    executor: Executor
    source: Source
    shares: Shares
    watcher: Watcher
    job_directories: JobDirectories
    max_retries: int = 0
    stop_on_failure: bool = False
    retry_failed: bool = False
    """Whether jobs that an earlier controller has seen fail run again."""
    slurm_restarts_it: bool = False
    """Whether Slurm starts this controller again: after a signal, it exits at once, and its jobs continue."""

    final_states: dict[int, JobState] = field(default_factory=dict)
    """The states of jobs that this controller does not start again."""
    signals: Signals = field(default_factory=Signals)
    problem: UserError | None = None
    """Why no further job can be started or recorded."""
    _jobs: dict[int, Job] = field(default_factory=dict)
    """The jobs that the source has given, until their states are final."""
    _retry_queue: deque[Job] = field(default_factory=deque)
    _running: dict[int, JobState] = field(default_factory=dict)
    """The states of running jobs, as they were written at the start."""
    _launcher_ended: dict[int, Ended] = field(default_factory=dict)
    """Running jobs whose launcher has ended, while a rank still has the lock of the run directory."""
    _prune_reasons: dict[int, str] = field(default_factory=dict)
    """Running jobs that were sent a signal because the source does not need them, and why."""
    _saving: dict[int, JobState] = field(default_factory=dict)
    """Jobs of an earlier controller, whose processes save and end."""
    _failed_builds: FailedBuilds = field(default_factory=FailedBuilds)
    _has_failed: bool = False
    _checked_at: float = 0.0

    def __post_init__(self) -> None:
        self._retries = Retries(self.max_retries)
        adopted = self.executor.adopt()
        for state in self.directory.states():
            if state.number in adopted and not state.is_over:
                self._running[state.number] = replace(state, state="running", error=None, reason=None)
                self._write(self._running[state.number])
            elif state.state == "running" and (process := self._process_of(state)) is not None:
                self._saving[state.number] = state
                log.warning("job %d still saves, in process %d on %s", state.number, process.pid, process.host)
            elif state.state == "running":  # its process was killed with its controller
                self._register(self._write_end(state, code=None))
            else:
                self._register(state)

    def _runs_again(self, state: JobState) -> bool:
        """Return whether a job that an earlier controller has started runs again."""
        return not state.is_over or (self.retry_failed and state.state == "failed")

    def _register(self, state: JobState) -> None:
        """Tell the source about a job that an earlier controller has run, unless it runs again."""
        if not self._runs_again(state):
            self.final_states[state.number] = state
            self.source.job_ended(state)
        elif state.state == "paused":
            self.source.job_ended(state)

    def run(self) -> None:
        """Run all jobs that are not over."""
        with self.signals.caught():
            while not (self.slurm_restarts_it and self.signals.received):
                self._check_jobs()
                self._start_jobs()
                self._prune_jobs()
                if not self._waits_for_jobs:
                    break
                for ended in self.executor.poll(_POLL):
                    if self.signals.received is not None:
                        self.signals.exit_codes.add(ended.code)
                    self._process_ended(ended)
                self._forward_signal()
                self.watcher.update()
            if self._no_job_can_be_built:
                self._interrupt_failed_builds()

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

    # The loop. -------------------------------------------------------------------------------------------------------

    @property
    def _waits_for_jobs(self) -> bool:
        """Whether the loop continues."""
        return bool(self._running) or (bool(self._saving) and not self._is_stopping)

    @property
    def _is_stopping(self) -> bool:
        """Whether no job is started or pruned any more."""
        return self.signals.received is not None or self.problem is not None

    @property
    def _starts_no_job(self) -> bool:
        return self._is_stopping or (self._has_failed and self.stop_on_failure) or self._no_job_can_be_built

    @property
    def _no_job_can_be_built(self) -> bool:
        """Whether two jobs have failed alike while they were built, and no job was built. Then the others would fail.

        While a running job may still be built, no other one starts.
        """
        known = chain(self.final_states.values(), self._running.values(), self._saving.values())
        return self._failed_builds.are_alike and not any(was_built(self.directory.run_dir(state)) for state in known)

    def _forward_signal(self) -> None:
        """Send the signal that this process has received to all running jobs."""
        if self.slurm_restarts_it or (sign := self.signals.to_forward()) is None:
            return
        for number in self._running:
            self.executor.cancel(number, sign)

    def _check_jobs(self) -> None:
        """Once a second, check the jobs whose end no executor reports.

        A rule that ends a running job, for example one that writes no records, belongs here: `self.executor.cancel`.
        """
        if time.monotonic() < self._checked_at + _CHECK_INTERVAL:
            return
        for ended in list(self._launcher_ended.values()):
            self._process_ended(ended)
        for state in list(self._saving.values()):
            if self._process_of(state) is None:
                del self._saving[state.number]
                self._earlier_job_ended(state)
        self._checked_at = time.monotonic()

    def _process_of(self, state: JobState) -> lock.Holder | None:
        """Return the process that trains in the directory of a job."""
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
                if job.number not in self._running and job.number not in self._saving:
                    return job
        return None

    def _start(self, job: Job) -> None:
        """Write that a job runs, then start its process.

        If this process is killed between the two, the next controller finds no process, and starts the job again.
        """
        number = job.number
        before = self.directory.state(number)
        try:
            run_dir = self.job_directories.of(job, before)
            state = self._end_of_damaged(before, run_dir) or self._write_start(job, before, run_dir)
        except OSError as error:
            self._set_unwritable(error)
            return
        except UserError as error:  # a mistake in the job
            state = replace(before, state="failed", attempts=before.attempts + 1, error=mask_text(describe(error)))
            self._write(state)
        if state.state != "running":
            self._finish(state)
            return
        self._running[number] = state
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
            self._attempt_ended(Ended(number, REQUEUE), state)
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

    # Jobs end. -------------------------------------------------------------------------------------------------------

    def _process_ended(self, ended: Ended) -> None:
        """Handle the end of the process that was started for a job. Its ranks may still run."""
        number = ended.number
        running = self._running.get(number)
        if running is None:  # an earlier controller has written its end
            return
        if self._process_of(running) is not None:  # a rank has not ended
            self._launcher_ended[number] = ended
            return
        self._attempt_ended(ended, running)

    def _attempt_ended(self, ended: Ended, running: JobState) -> None:
        """Write how an attempt has ended. Then retry the job, or make its state final."""
        number = ended.number
        self._running.pop(number)
        self._launcher_ended.pop(number, None)
        if self.shares.slots is not None:
            self.shares.slots.give(number)
        state = self._write_end(running, ended.code, self._prune_reasons.pop(number, None))
        if not self._starts_no_job and self._retries.use(ended, state, running.iterations):
            self._start_again(state)
            self.watcher.ended(state)
        else:
            self._finish(state)

    def _earlier_job_ended(self, running: JobState) -> None:
        """Write the end of a job whose controller was killed. Start it again if it is not over."""
        state = self._write_end(running, code=None)
        if state.state != "paused" and self._runs_again(state):
            self._start_again(state)
        else:
            self._finish(state)

    def _start_again(self, state: JobState) -> None:
        """Queue a job that was interrupted or has failed. If the source has not given it yet, it comes from there."""
        if state.number in self._jobs:
            self._retry_queue.append(self._jobs[state.number])

    def _finish(self, state: JobState) -> None:
        """Make a state final: this controller does not start the job again."""
        self._has_failed = self._has_failed or state.state in ("failed", "interrupted")
        self._failed_builds.add(state, self.directory.run_dir(state))
        self.final_states[state.number] = state
        self._jobs.pop(state.number, None)
        self.source.job_ended(state)
        self.watcher.ended(state)

    def _interrupt_failed_builds(self) -> None:
        """Let a resumed sweep start the jobs again that could not be built, and the pruned ones of their trials."""
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

    # A search ends jobs early. ---------------------------------------------------------------------------------------

    def _prune_jobs(self) -> None:
        """End the jobs that the source does not need any more."""
        if self._is_stopping:
            return
        unwanted: dict[int, str] = {}
        with self._errors_of_source():
            unwanted.update(self.source.jobs_to_prune(self._running.values()))
        for number, reason in unwanted.items():
            if number in self._running:
                if number not in self._prune_reasons:
                    self._prune_reasons[number] = reason
                    self.executor.cancel(number, signal.SIGTERM)  # it saves and ends, as after a preemption
            elif number not in self._saving:
                state = job_states.pruned(self.directory.state(number), reason)
                self._write(state)
                self._finish(state)

    @contextmanager
    def _errors_of_source(self) -> Iterator[None]:
        """In the body, the source decides. If it cannot, no further job starts."""
        try:
            yield
        except UserError as error:
            self.problem = self.problem or error
        except OSError as error:
            self.problem = self.problem or UserError(f"the next job cannot be chosen: {error}")
