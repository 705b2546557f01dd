"""The loop of a sweep: starts the jobs of a source, writes what killed jobs could not, and passes signals on.

All that it knows is in the directory too. Therefore a controller may be killed, and others may share the work. The
state of a running job names the controller that has started it, and that one retries it and sends signals to it. When
that controller has ended, another one on the same machine adopts the job.

The loop has no threads, and sleeps only in `Executor.poll`.
"""

from __future__ import annotations

import shlex
import shutil
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Protocol

from hydraloop.errors import UserError
from hydraloop.processes.failure import REQUEUE
from hydraloop.run_files import lock
from hydraloop.run_files.processes import machine, send
from hydraloop.sweeps import queue
from hydraloop.sweeps.executors.executor import LEFT, NOT_RECORDED, Ended, Executor, Request
from hydraloop.sweeps.executors.gpus import Shares
from hydraloop.sweeps.source import Job, Source
from hydraloop.sweeps.states import JobState
from hydraloop.sweeps.sweep_directory import SweepDirectory

_POLL = 0.2
"""Seconds between two looks at signals and two updates of the display."""
_LOOK = 1.0
"""Seconds between two looks at jobs that other controllers have started, and two renewals of this one's lock."""
_LOSSES = 10
"""How often a job whose machine was lost starts again without a retry. More often, the job may be the cause."""
_SECOND = 0.5
"""Seconds after which a signal is a second one. A terminal that is closed sends SIGHUP several times."""


class Watcher(Protocol):
    """Shows the user what happens."""

    def started(self, state: JobState) -> None:
        """Called when a job was started, with the state before."""

    def ended(self, state: JobState) -> None:
        """Called when a job has ended, also when it is retried."""

    def update(self) -> None:
        """Called several times a second."""


@dataclass
class Controller:
    """Runs the jobs of a sweep.

    Each job is in one place: with the source or in `_queue` if it is to start, in `_running` if this controller answers
    for its process, in `_elsewhere` if another controller does, and in `ended` if it is over or is left as it is.
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

    ended: dict[int, JobState] = field(default_factory=dict)
    """Jobs that are over, and those that this controller leaves as they are."""
    signals: list[int] = field(default_factory=list)
    """What this process has received."""
    problem: UserError | None = None
    """Why no further job can be started or recorded."""
    _queue: deque[Job] = field(default_factory=deque)
    """Jobs that start again when the source has no other."""
    _given: dict[int, Job] = field(default_factory=dict)
    """The jobs that the source has given, until they have ended."""
    _attempts: Counter[int] = field(default_factory=Counter)
    """Attempts of each job that this controller knows of."""
    _running: dict[int, JobState] = field(default_factory=dict)
    """The attempt that this controller has started or adopted, with the iterations of earlier ones."""
    _unreported: dict[int, Ended] = field(default_factory=dict)
    """Running jobs whose end the executor does not report: adopted ones, and those whose launcher has ended, but not
    all ranks. The end of that launcher."""
    _pruned: dict[int, str] = field(default_factory=dict)
    """Running jobs that were told to end, and why."""
    _elsewhere: set[int] = field(default_factory=set)
    _retries: Counter[int] = field(default_factory=Counter)
    _losses: Counter[int] = field(default_factory=Counter)
    """How often the machine of each job was lost."""
    _codes: set[int | None] = field(default_factory=set)
    """Exit codes of jobs after a signal."""
    _has_failed: bool = False
    _passed_on: float | None = None
    """When the first signal was passed on."""
    _looked: float = 0.0

    def __post_init__(self) -> None:
        for state in self.directory.states():
            if state.state == "running":
                state = self._state(state.number)  # its process may have been killed
            self._attempts[state.number] = state.attempts
            if state.state == "running":
                self._elsewhere.add(state.number)
            elif self._leaves(state):
                self.ended[state.number] = state
                self.source.ended(state)
            elif state.state == "paused":
                self.source.ended(state)

    def run(self) -> None:
        """Run all jobs that are not over."""
        with self._signals_noted():
            while self._goes_on():
                for ended in self.executor.poll(_POLL):
                    if self.signals:
                        self._codes.add(ended.code)
                    self._end(ended)
                self._pass_signals_on()
                self.watcher.update()
            self._prune()  # the source is told of the last ends
        for number, state in self.ended.items():  # another controller may have finished it since
            if state.state != "finished":
                self.ended[number] = self.directory.state(number)

    def _goes_on(self) -> bool:
        """Start jobs. Return whether there is one to wait for."""
        self._look()
        self._start()
        self._prune()
        waits = self.source.waits and not self.stops
        return bool(self._running) or waits or (bool(self._elsewhere) and self._waits_for_others)

    def _leaves(self, state: JobState) -> bool:
        """Return whether a job that does not run is left as it is."""
        return state.is_over and not (self.retry_failed and state.state == "failed")

    @property
    def _waits_for_others(self) -> bool:
        """Whether to wait for the jobs of other controllers."""
        return not self._gives_up

    @property
    def stops(self) -> bool:
        """Whether no further job starts."""
        return self._gives_up or (self._has_failed and self.stop_on_failure)

    @property
    def left(self) -> list[int]:
        """The numbers of jobs that are not over."""
        over = {number for number, state in self.ended.items() if state.is_over}
        return [number for number in range(self.source.count) if number not in over]

    @property
    def failed(self) -> list[JobState]:
        """The jobs that have failed or were killed, by number."""
        kinds = ("failed",) if self.signals else ("failed", "interrupted")
        return [state for _, state in sorted(self.ended.items()) if state.state in kinds]

    @property
    def code(self) -> int:
        """The exit code of the command."""
        if self.signals:
            is_saved = REQUEUE in self._codes and self._codes <= {0, REQUEUE}
            return REQUEUE if is_saved else 128 + self.signals[0]
        return 1 if self.failed or self.problem is not None else 0

    @property
    def _gives_up(self) -> bool:
        return bool(self.signals) or self.problem is not None

    def _look(self) -> None:
        """Look for ends that the executor does not report, and adopt jobs whose controller has ended."""
        if time.monotonic() < self._looked + _LOOK:
            return
        self.directory.renew()
        for ended in list(self._unreported.values()):
            self._end(ended)
        found = [self._state(number) for number in sorted(self._elsewhere)]
        others = self.directory.controllers().keys() - {self.directory.controller}
        for state in found:
            is_running = state.state == "running"
            is_adoptable = state.machine == machine() and state.controller not in others and not self._gives_up
            if is_running and not (is_adoptable and self.executor.jobs_outlive_it):
                continue
            self._elsewhere.remove(state.number)
            if is_running:
                self._running[state.number], self._unreported[state.number] = state, Ended(state.number, None)
                if self.shares.slots is not None:
                    self.shares.slots.hold(state.number, state.gpus)
            elif state.is_left or self._leaves(state):
                self._leave(state)
            else:
                self._start_again(state)
        self._looked = time.monotonic()

    def _start(self) -> None:
        """Start jobs while there is room."""
        while self._has_room and (job := self._next()) is not None:
            state = self._state(job.number)
            if state.state == "running":
                self._elsewhere.add(job.number)
            elif state.attempts != self._attempts[job.number] and (state.is_left or self._leaves(state)):
                self._leave(state)  # another controller has run it
            else:
                self._submit(job, state)

    def _prune(self) -> None:
        """End the jobs that the source does not need any more."""
        if self._gives_up:
            return
        try:
            unwanted = dict(self.source.look(self._running.values()))
        except (OSError, UserError) as error:
            self._set_undecided(error)
            return
        for number, reason in unwanted.items():
            if number in self._running and number not in self._pruned:
                self._pruned[number] = reason
                self._signal(number, signal.SIGTERM)  # it saves and ends, as after a preemption
            elif number not in self._running and number not in self._elsewhere:
                state = self._pruned_state(number, reason)
                if state is not None:
                    self._leave(state)

    def _pruned_state(self, number: int, reason: str) -> JobState | None:
        """Write that a job is pruned. None if another process has it."""
        try:
            return queue.prune(self.directory, number, reason)
        except (OSError, UserError) as error:
            self._set_undecided(error)
            return None

    def _set_undecided(self, error: OSError | UserError) -> None:
        """Start no further job: the source cannot decide which one is next."""
        problem = error if isinstance(error, UserError) else UserError(f"the next job cannot be chosen: {error}")
        self.problem = self.problem or problem

    @property
    def _has_room(self) -> bool:
        slots = self.shares.slots
        return not self.stops and len(self._running) < self.shares.workers and (slots is None or slots.are_free)

    def _next(self) -> Job | None:
        """Return the next job to start; None if no job can start now."""
        while (job := self._given_by_source()) is not None:
            self._given[job.number] = job
            if job.number not in self._running and job.number not in self._elsewhere:
                return job
        return self._queue.popleft() if self._queue else None

    def _given_by_source(self) -> Job | None:
        try:
            return self.source.next_job()
        except (OSError, UserError) as error:
            self._set_undecided(error)
            return None

    def _start_again(self, state: JobState) -> None:
        """Queue a job that has ended early. A job that the source has not given yet comes from there."""
        self._attempts[state.number] = state.attempts
        if state.number in self._given:
            self._queue.append(self._given[state.number])

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
            self._give(number)
            return
        self._running[number] = replace(state, attempts=state.attempts + 1, controller=self.directory.controller)
        self.watcher.started(state)

    def _end(self, ended: Ended) -> None:
        """Queue a job whose process has ended again, or leave it as it is."""
        number, code = ended.number, ended.code
        begun = self._running[number]
        attempt = begun.attempts
        state = self._state(number, code, attempt)
        # Slurm may have started the job again since.
        is_ours = state.attempts >= attempt and state.controller == begun.controller
        if is_ours and state.state == "running" and self.problem is None:  # a rank is still ending
            self._unreported[number] = replace(ended, code=None) if code == LEFT else ended
            return
        self._give(number)
        reason = self._pruned.pop(number, None)
        if reason is not None and is_ours and state.state == "interrupted":
            state = self._pruned_state(number, reason) or state
        if not is_ours or state.state == "running":  # another controller was faster, or the state cannot be written
            self._elsewhere.add(number)
            if code == NOT_RECORDED:
                self._set_unwritable("see its log")
        elif not ended.is_cancelled and self._starts_again(state, begun.iterations, ended):
            self._start_again(state)
            self.watcher.ended(state)
        else:
            self._leave(state)

    def _starts_again(self, state: JobState, iterations: int, ended: Ended) -> bool:
        """Return whether a job is queued again. Count it as a retry unless the job was preempted or lost.

        Args:
            iterations: of the job before the attempt. An attempt without progress is a retry: it might repeat forever.
            ended: how its process has ended.
        """
        if state.state not in ("failed", "interrupted") or state.has_diverged or self.stops:
            return False
        cause = state.preempted_by
        is_preempted = cause is not None and (ended.by_scheduler or cause not in signal.Signals.__members__)
        if ended.is_lost and state.state == "interrupted" and self._losses[state.number] < _LOSSES:
            self._losses[state.number] += 1
            return True
        if is_preempted and state.iterations > iterations:
            return True
        self._retries[state.number] += 1
        return self._retries[state.number] <= self.max_retries

    def _state(self, number: int, code: int | None = None, attempt: int | None = None) -> JobState:
        """Return the state of a job; if it cannot be written, the one before."""
        try:
            return queue.end(self.directory, number, code, attempt)
        except (OSError, UserError) as error:
            self._set_unwritable(str(getattr(error, "strerror", None) or getattr(error, "problem", error)))
            return self.directory.state(number)

    def _set_unwritable(self, why: str) -> None:
        path = self.directory.path
        free = shutil.disk_usage(path).free
        problem = f"the state of a job could not be written to {path}, where {free / 1e6:.0f} MB are free: {why}"
        remedy = f"Repair that, and continue the sweep: sweep.resume={shlex.quote(str(path))}"
        self.problem = self.problem or UserError(problem, key="hydra.sweep.dir", remedy=remedy)

    def _leave(self, state: JobState) -> None:
        self._has_failed = self._has_failed or state.state in ("failed", "interrupted")
        self.ended[state.number] = state
        self._attempts[state.number] = state.attempts
        self._given.pop(state.number, None)
        self.source.ended(state)
        self.watcher.ended(state)

    def _give(self, number: int) -> None:
        """Note that a job does not use this machine any more."""
        self._running.pop(number, None)
        self._unreported.pop(number, None)
        if self.shares.slots is not None:
            self.shares.slots.give(number)

    def _pass_signals_on(self) -> None:
        """Send the first signal to all jobs, which save and end. Kill them after a second one."""
        if self.signals and self._passed_on is None:
            self._passed_on = time.monotonic()
            del self.signals[1:]
            self._send(signal.Signals(self.signals[0]))
        elif len(self.signals) > 1:
            self._send(signal.SIGKILL)
            del self.signals[1:]  # once: with Slurm it is a command for each job

    def _send(self, sign: signal.Signals) -> None:
        for number in self._running:
            self._signal(number, sign)

    def _signal(self, number: int, sign: signal.Signals) -> None:
        if number not in self._unreported:
            self.executor.cancel(number, sign)
            return
        held = lock.holder(self.directory.folder(number))
        for pid, since in [] if held is None else held.alive[:1]:  # it signals the others
            send(pid, since, sign)

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        """In the body, note signals for the loop. Outside the main thread, and for ignored signals, do nothing."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self._passed_on is None or time.monotonic() > self._passed_on + _SECOND:
                self.signals.append(number)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        is_main = threading.current_thread() is threading.main_thread()
        noted = [number for number in numbers if is_main and signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handle) for number in noted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
