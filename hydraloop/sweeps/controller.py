"""Why a controller starts no further job."""

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
from pathlib import Path
from typing import Protocol

from hydraloop.errors import UserError
from hydraloop.files import lock
from hydraloop.files.result import describe
from hydraloop.files.secrets import mask_text
from hydraloop.launch.failure import REQUEUE
from hydraloop.sweeps import job_states, retries
from hydraloop.sweeps.executors.executor import Ended, Executor, Request
from hydraloop.sweeps.executors.gpus import Shares
from hydraloop.sweeps.job_directories import RunDirectories
from hydraloop.sweeps.job_states import REQUEST, Job, JobState, Source
from hydraloop.sweeps.retries import Retries
from hydraloop.sweeps.signals import Signals
from hydraloop.sweeps.sweep_directory import SweepDirectory


def unwritable(path: Path, why: str) -> UserError:
    """Return the problem that the state of a job of the sweep in `path` could not be written."""
    free = shutil.disk_usage(path).free / 1e6
    return UserError(
        f"the state of a job could not be written to {path}, where {free:.0f} MB are free: {why}",
        key="hydra.sweep.dir",
        remedy=f"Repair that, and continue the sweep: sweep.resume={shlex.quote(str(path))}",
    )


def undecided(error: OSError | UserError) -> UserError:
    """Return the problem that the source of the sweep cannot choose the next job."""
    return error if isinstance(error, UserError) else UserError(f"the next job cannot be chosen: {error}")


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
"""Seconds between two looks at signals and two updates of the display."""
_LOOK = 1.0
"""Seconds between two looks whether processes of ended jobs, and of an earlier controller's, have ended."""


@dataclass
class Controller:
    """Runs the jobs of a sweep.

    Each job is in one place: with the source or in `_again` if it is to start, in `_running` if this controller answers
    for its process, in `_earlier` if it is waited for, and in `ended` if it is over or is left as it is.
    """

    directory: SweepDirectory
    executor: Executor
    source: Source
    shares: Shares
    watcher: Watcher
    run_directories: RunDirectories
    max_retries: int = 0
    stop_on_failure: bool = False
    retry_failed: bool = False
    """Whether to run jobs again that have failed earlier."""
    leaves_jobs: bool = False
    """Whether jobs go on after a signal, as Slurm starts this controller again."""

    ended: dict[int, JobState] = field(default_factory=dict)
    """Jobs that are over, and those that this controller leaves as they are."""
    signals: Signals = field(default_factory=Signals)
    problem: UserError | None = None
    """Why no further job can be started or recorded."""
    _given: dict[int, Job] = field(default_factory=dict)
    """The jobs that the source has given, until they have ended."""
    _again: deque[Job] = field(default_factory=deque)
    """Jobs that start again, before the source is asked for another."""
    _running: dict[int, JobState] = field(default_factory=dict)
    """Their states, as written when the attempt has begun."""
    _ending: dict[int, Ended] = field(default_factory=dict)
    """The ends of the launchers of running jobs of which a rank has the lock."""
    _pruned: dict[int, str] = field(default_factory=dict)
    """Running jobs that were told to end, and why."""
    _earlier: dict[int, JobState] = field(default_factory=dict)
    """Jobs that an earlier controller has started, whose processes save and end."""
    _has_failed: bool = False
    _looked: float = 0.0

    def __post_init__(self) -> None:
        self._retries = Retries(self.max_retries)
        found = self.executor.found()
        for state in self.directory.states():
            if state.number in found and not state.is_over:
                self._running[state.number] = replace(state, state="running")
                self._write(self._running[state.number])
                continue
            if state.state == "running" and (held := self._holder(state)) is not None:
                self._earlier[state.number] = state
                log.warning("job %d still saves, in process %d on %s", state.number, held.pid, held.host)
                continue
            if state.state == "running":  # it was lost with its controller
                state = self._ended_state(state, None)
            if self._leaves(state):
                self.ended[state.number] = state
                self.source.ended(state)
            elif state.state == "paused":
                self.source.ended(state)

    def run(self) -> None:
        """Run all jobs that are not over."""
        with self.signals.noted():
            while self._goes_on():
                for ended in self.executor.poll(_POLL):
                    if self.signals.first is not None:
                        self.signals.ends.add(ended.code)
                    self._end(ended)
                if not self.leaves_jobs and (sign := self.signals.to_send()) is not None:
                    for number in self._running:
                        self.executor.cancel(number, sign)
                self.watcher.update()
            self._prune()  # the source is told of the last ends

    @property
    def stops(self) -> bool:
        """Whether no further job starts."""
        return self._gives_up or (self._has_failed and self.stop_on_failure)

    @property
    def left(self) -> list[int]:
        """The numbers of jobs that are not over."""
        over = {number for number, state in self.ended.items() if state.is_over}
        return [number for number in self.source.numbers if number not in over]

    @property
    def failed(self) -> list[JobState]:
        """The jobs that have failed or were killed, by number."""
        kinds = ("failed", "interrupted") if self.signals.first is None else ("failed",)
        return [state for _, state in sorted(self.ended.items()) if state.state in kinds]

    @property
    def code(self) -> int:
        """The exit code of the command."""
        if self.signals.first is not None:
            return REQUEUE if self.leaves_jobs else self.signals.code
        return 1 if self.failed or self.problem is not None else 0

    # One turn of the loop. -------------------------------------------------------------------------------------------

    def _goes_on(self) -> bool:
        """Start jobs. Return whether there is one to wait for."""
        if self.leaves_jobs and self.signals.first is not None:
            return False
        if time.monotonic() >= self._looked + _LOOK:
            self._look()
            self._looked = time.monotonic()
        self._start()
        self._prune()
        return bool(self._running) or (bool(self._earlier) and not self._gives_up)

    @property
    def _gives_up(self) -> bool:
        return self.signals.first is not None or self.problem is not None

    def _leaves(self, state: JobState) -> bool:
        """Return whether a job that does not run is left as it is."""
        return state.is_over and not (self.retry_failed and state.state == "failed")

    def _look(self) -> None:
        """Look at jobs whose ranks still end, and at the jobs of an earlier controller."""
        for ended in list(self._ending.values()):
            self._end(ended)
        for state in list(self._earlier.values()):
            if self._holder(state) is not None:
                continue
            del self._earlier[state.number]
            state = self._ended_state(state, None)
            if state.is_left or self._leaves(state):
                self._leave(state)
            else:
                self._start_again(state)

    def _holder(self, state: JobState) -> lock.Holder | None:
        """Return the process that trains in the directory of a job."""
        return lock.holder(self.directory.run_dir(state))

    # Jobs start. -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start jobs while there is room."""
        while self._has_room and (job := self._next()) is not None:
            self._submit(job, self.directory.state(job.number))

    @property
    def _has_room(self) -> bool:
        slots = self.shares.slots
        return not self.stops and len(self._running) < self.shares.workers and (slots is None or slots.are_free)

    def _next(self) -> Job | None:
        """Return the next job to start; None if no job can start now."""
        if self._again:
            return self._again.popleft()
        with self._source_asked():
            while (job := self.source.next_job()) is not None:
                self._given[job.number] = job
                if job.number not in self._running and job.number not in self._earlier:
                    return job
        return None

    def _submit(self, job: Job, before: JobState) -> None:
        """Write that a job runs, and start it."""
        slots, number = self.shares.slots, job.number
        try:
            begun = self._begun(job, before)
        except OSError as error:
            self._set_unwritable(error)
            return
        except UserError as error:  # a mistake in the job
            failed = replace(before, state="failed", attempts=before.attempts + 1, error=mask_text(describe(error)))
            self._write(failed)
            self._leave(failed)
            return
        if begun.state != "running":
            self._leave(begun)
            return
        request = Request(
            number,
            job.lines,
            str(self.directory.folder(number)),
            str(self.directory.run_dir(begun)),
            begun.attempts,
            None if slots is None else slots.take(number),
            self.shares.threads,
        )
        self._running[number] = begun
        try:
            self.executor.submit(request)
        except UserError as error:
            self.problem = error
            self._end(Ended(number, REQUEUE))
            return
        self.watcher.started(begun)

    def _begun(self, job: Job, before: JobState) -> JobState:
        """Write that a job runs, and return that state; its end, if it has ended and only its state was damaged."""
        found = replace(before, directory=self.run_directories.of(job, before))
        if before.attempts and found.directory != before.directory:
            told = job_states.ended_from_result(found, self.directory.run_dir(found))
            if told is not None and told.is_over:
                self.directory.write(told)
                return told
        return retries.begin(self.directory, job, before, found.directory)

    def _start_again(self, state: JobState) -> None:
        """Queue a job that has ended early. A job that the source has not given yet comes from there."""
        if state.number in self._given:
            self._again.append(self._given[state.number])

    # Jobs end. -------------------------------------------------------------------------------------------------------

    def _end(self, ended: Ended) -> None:
        """Write how a job has ended. Queue it again, or leave it as it is."""
        number = ended.number
        begun = self._running.get(number)
        if begun is None:  # an earlier controller has written its end
            return
        if self._holder(begun) is not None and self.problem is None:  # a rank is still ending
            self._ending[number] = ended
            return
        self._release(number)
        reason = self._pruned.pop(number, None)
        state = self._ended_state(begun, ended.code, reason)
        if not self.stops and self._retries.allow(state, begun.iterations, ended):
            self._start_again(state)
            self.watcher.ended(state)
        else:
            self._leave(state)

    def _release(self, number: int) -> None:
        """Note that a job does not use this machine any more."""
        self._running.pop(number, None)
        self._ending.pop(number, None)
        if self.shares.slots is not None:
            self.shares.slots.give(number)

    def _leave(self, state: JobState) -> None:
        self._has_failed = self._has_failed or state.state in ("failed", "interrupted")
        self.ended[state.number] = state
        self._given.pop(state.number, None)
        self.source.ended(state)
        self.watcher.ended(state)

    def _ended_state(self, begun: JobState, code: int | None, pruned: str | None = None) -> JobState:
        """Return the state of a job that has ended, and write it.

        Args:
            code: the exit code of its process; None if unknown.
            pruned: why it was told to end, if it is not to continue.
        """
        told = job_states.ended_from_result(begun, self.directory.run_dir(begun))
        state = told or retries.lost(self.directory, begun, code)
        if pruned is not None:
            state = retries.prune(state, pruned)
        self._write(state, flush=told is None or pruned is not None)  # no other file tells it
        with suppress(OSError):
            Path(self.directory.folder(state.number), REQUEST).unlink(missing_ok=True)
        return state

    def _write(self, state: JobState, *, flush: bool = True) -> None:
        try:
            self.directory.write(state, flush=flush)
        except OSError as error:
            self._set_unwritable(error)

    def _set_unwritable(self, error: OSError) -> None:
        why = error.strerror or str(error)
        self.problem = self.problem or unwritable(self.directory.path, why)

    # A search ends jobs early. ---------------------------------------------------------------------------------------

    def _prune(self) -> None:
        """End the jobs that the source does not need any more."""
        unwanted: dict[int, str] = {}
        if not self._gives_up:
            with self._source_asked():
                unwanted.update(self.source.look(self._running.values()))
        for number, reason in unwanted.items():
            if number in self._running and number not in self._pruned:
                self._pruned[number] = reason
                self.executor.cancel(number, signal.SIGTERM)  # it saves and ends, as after a preemption
            elif number not in self._running and number not in self._earlier:
                state = retries.prune(self.directory.state(number), reason)
                self._write(state)
                self._leave(state)

    @contextmanager
    def _source_asked(self) -> Iterator[None]:
        """In the body, note why the next job cannot be chosen: no further job starts."""
        try:
            yield
        except (OSError, UserError) as error:
            self.problem = self.problem or undecided(error)
