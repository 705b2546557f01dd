"""The loop of a sweep: starts the jobs of a source, writes what killed jobs could not, and passes signals on.

All that it knows is in the directory too, whose lock it holds. Therefore a controller may be killed, and the next one
continues. Jobs of a controller that has ended save and end; those of Slurm go on.

The loop has no threads, and sleeps only in `Executor.poll`.
"""

from __future__ import annotations

import signal
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from hydraloop.errors import UserError
from hydraloop.processes.failure import REQUEUE
from hydraloop.sweeps import queue
from hydraloop.sweeps.controller import problems
from hydraloop.sweeps.controller.retries import Retries
from hydraloop.sweeps.controller.signals import Signals
from hydraloop.sweeps.controller.watcher import Watcher
from hydraloop.sweeps.executors.executor import LEFT, NOT_RECORDED, Ended, Executor, Request
from hydraloop.sweeps.executors.gpus import Shares
from hydraloop.sweeps.source import Job, Source
from hydraloop.sweeps.states import JobState
from hydraloop.sweeps.sweep_directory import SweepDirectory

_POLL = 0.2
"""Seconds between two looks at signals and two updates of the display."""
_LOOK = 1.0
"""Seconds between two looks at jobs that an earlier controller has started."""


@dataclass
class Controller:
    """Runs the jobs of a sweep.

    Each job is in one place: with the source or in `_again` if it is to start, in `_running` if this controller answers
    for its process, in `_elsewhere` if it is waited for, and in `ended` if it is over or is left as it is.
    """

    directory: SweepDirectory
    executor: Executor
    source: Source
    shares: Shares
    watcher: Watcher
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
    """The attempt that this controller has started, with the iterations of earlier ones."""
    _unreported: dict[int, Ended] = field(default_factory=dict)
    """The ends of the launchers of running jobs whose ranks have not all ended."""
    _pruned: dict[int, str] = field(default_factory=dict)
    """Running jobs that were told to end, and why."""
    _elsewhere: set[int] = field(default_factory=set)
    """Jobs whose processes an earlier controller has started, and which have not ended."""
    _has_failed: bool = False
    _looked: float = 0.0

    def __post_init__(self) -> None:
        self._retries = Retries(self.max_retries)
        found = self.executor.found()
        for state in self.directory.states():
            if state.number in found:
                attempt = found[state.number]
                is_claimed = state.attempts >= attempt  # otherwise it is queued, and no file tells of it
                self._running[state.number] = state if is_claimed else replace(state, attempts=attempt, controller="")
                continue
            if state.state == "running":
                state = self._state(state.number)  # its process may have been killed
            if state.state == "running":
                self._elsewhere.add(state.number)
            elif self._leaves(state):
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
        return bool(self._running) or (bool(self._elsewhere) and not self._gives_up)

    @property
    def _gives_up(self) -> bool:
        return self.signals.first is not None or self.problem is not None

    def _leaves(self, state: JobState) -> bool:
        """Return whether a job that does not run is left as it is."""
        return state.is_over and not (self.retry_failed and state.state == "failed")

    def _look(self) -> None:
        """Look at jobs whose ranks still end, and at the jobs of an earlier controller."""
        for ended in list(self._unreported.values()):
            self._end(ended)
        for state in [self._state(number) for number in sorted(self._elsewhere)]:
            if state.state == "running":
                continue
            self._elsewhere.remove(state.number)
            if state.is_left or self._leaves(state):
                self._leave(state)
            else:
                self._start_again(state)

    # Jobs start. -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        """Start jobs while there is room."""
        while self._has_room and (job := self._next()) is not None:
            state = self._state(job.number)
            if state.state == "running":
                self._elsewhere.add(job.number)
            else:
                self._submit(job, state)

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
                if job.number not in self._running and job.number not in self._elsewhere:
                    return job
        return None

    def _submit(self, job: Job, state: JobState) -> None:
        """Start a job."""
        slots, number = self.shares.slots, job.number
        request = Request(
            number,
            job.lines,
            str(self.directory.folder(number)),
            state.attempts,
            self.directory.controller,
            None if slots is None else slots.take(number),
            self.shares.threads,
        )
        try:
            self.executor.submit(request)
        except UserError as error:
            self.problem = error
            self._release(number)
            return
        self._running[number] = replace(state, attempts=state.attempts + 1, controller=self.directory.controller)
        self.watcher.started(state)

    def _start_again(self, state: JobState) -> None:
        """Queue a job that has ended early. A job that the source has not given yet comes from there."""
        if state.number in self._given:
            self._again.append(self._given[state.number])

    # Jobs end. -------------------------------------------------------------------------------------------------------

    def _end(self, ended: Ended) -> None:
        """Queue a job whose process has ended again, or leave it as it is."""
        number, code = ended.number, ended.code
        begun = self._running[number]
        attempt = begun.attempts
        state = self._state(number, code, attempt)
        # Slurm may have started the job again since.
        is_ours = state.attempts >= attempt and begun.controller in (state.controller, "")
        if is_ours and state.state == "running" and self.problem is None:  # a rank is still ending
            self._unreported[number] = replace(ended, code=None) if code == LEFT else ended
            return
        self._release(number)
        reason = self._pruned.pop(number, None)
        if reason is not None and is_ours and state.state == "interrupted":
            state = self._pruned_state(number, reason) or state
        if not is_ours or state.state == "running":  # Slurm has started it again, or the state cannot be written
            self._elsewhere.add(number)
            if code == NOT_RECORDED:
                self._set_unwritable("see its log")
        elif not self.stops and self._retries.allow(state, begun.iterations, ended):
            self._start_again(state)
            self.watcher.ended(state)
        else:
            self._leave(state)

    def _release(self, number: int) -> None:
        """Note that a job does not use this machine any more."""
        self._running.pop(number, None)
        self._unreported.pop(number, None)
        if self.shares.slots is not None:
            self.shares.slots.give(number)

    def _leave(self, state: JobState) -> None:
        self._has_failed = self._has_failed or state.state in ("failed", "interrupted")
        self.ended[state.number] = state
        self._given.pop(state.number, None)
        self.source.ended(state)
        self.watcher.ended(state)

    def _state(self, number: int, code: int | None = None, attempt: int | None = None) -> JobState:
        """Return the state of a job; if it cannot be written, the one before."""
        try:
            return queue.end(self.directory, number, code, attempt)
        except UserError as error:
            self._set_unwritable(error.problem)
        except OSError as error:
            self._set_unwritable(error.strerror or str(error))
        return self.directory.state(number)

    def _set_unwritable(self, why: str) -> None:
        self.problem = self.problem or problems.unwritable(self.directory.path, why)

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
            elif number not in self._running and number not in self._elsewhere:
                state = self._pruned_state(number, reason)
                if state is not None:
                    self._leave(state)

    def _pruned_state(self, number: int, reason: str) -> JobState | None:
        """Write that a job is pruned. None if another process has it."""
        state = None
        with self._source_asked():
            state = queue.prune(self.directory, number, reason)
        return state

    @contextmanager
    def _source_asked(self) -> Iterator[None]:
        """In the body, note why the next job cannot be chosen: no further job starts."""
        try:
            yield
        except (OSError, UserError) as error:
            self.problem = self.problem or problems.undecided(error)
