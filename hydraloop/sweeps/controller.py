"""The loop of a sweep: starts jobs, settles those whose process has ended, retries, and passes signals on.

All that it knows is in the directory too. Therefore a controller may be killed, and others may share the work. It has
no threads, and sleeps only in `Executor.poll`.
"""

from __future__ import annotations

import shutil
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

from hydraloop.errors import UserError
from hydraloop.launch.failure import REQUEUE
from hydraloop.run.processes import machine, send
from hydraloop.sweeps.directory import SweepDirectory
from hydraloop.sweeps.executors.executor import LEFT, NOT_RECORDED, Executor, Request
from hydraloop.sweeps.executors.gpus import Shares
from hydraloop.sweeps.states import JobState

_POLL = 0.2
"""Seconds between two looks at signals and two updates of the display."""
_LOOK = 1.0
"""Seconds between two looks at jobs that other controllers have started."""
_RENEW = 10.0
"""Seconds between two renewals of this controller's mark."""
_SECOND = 0.5
"""Seconds after which a signal is a second one. A terminal that is closed sends SIGHUP several times."""


class Watcher(Protocol):
    """Shows the user what happens."""

    def started(self, state: JobState) -> None:
        """Called when a job was started, with the state before."""

    def ended(self, state: JobState) -> None:
        """Called when a job has ended, also when it is retried, or another controller has started it."""

    def update(self) -> None:
        """Called several times a second."""


@dataclass
class Controller:
    """Runs the jobs of a sweep."""

    directory: SweepDirectory
    executor: Executor
    lines: Callable[[int], tuple[str, ...]]
    """Returns the overrides of a job, not masked."""
    shares: Shares
    watcher: Watcher
    environment: Mapping[str, str] = field(default_factory=dict)
    """`hydra.job.env_set`."""
    max_retries: int = 0
    stop_on_failure: bool = False

    ended: dict[int, JobState] = field(default_factory=dict)
    """Jobs that are over, and those that this controller leaves as they are."""
    signals: list[int] = field(default_factory=list)
    """What this process has received."""
    problem: UserError | None = None
    """Why no further job can be started or recorded."""
    _pending: deque[int] = field(default_factory=deque)
    _running: dict[int, int] = field(default_factory=dict)
    """Jobs that this controller has started, and which attempt it is."""
    _elsewhere: set[int] = field(default_factory=set)
    """Jobs that other controllers have started."""
    _adopted: dict[int, JobState] = field(default_factory=dict)
    """Those of them that use this machine, and whose controller has ended."""
    _repeated: dict[int, int] = field(default_factory=dict)
    """Jobs that have failed and are run again, and their attempts until then."""
    _retries: Counter[int] = field(default_factory=Counter)
    _codes: set[int | None] = field(default_factory=set)
    """Exit codes of jobs after a signal."""
    _has_failed: bool = False
    _passed_on: float | None = None
    """When the first signal was passed on."""
    _looked: float = 0.0
    _renewed: float = 0.0

    def run(self, *, retry_failed: bool = False) -> None:
        """Run all jobs that are not over.

        Args:
            retry_failed: whether to run jobs again that have failed.
        """
        # Jobs that run already first: they keep their GPUs.
        for state in sorted(self.directory.states(), key=lambda state: state.state != "running"):
            if state.is_over and not (retry_failed and state.state == "failed"):
                self.ended[state.number] = state
            else:
                self._queue(state)
        with self._signals_noted():
            while (
                self._running
                or self._adopted
                or (self._elsewhere and not self._gives_up)
                or (self._pending and not self.stops)
            ):
                self._start()
                for ended in self.executor.poll(_POLL if self._running or self._elsewhere else 0.0):
                    self._end(ended.number, ended.code)
                self._look_elsewhere()
                self._pass_signals_on()
                self._renew()
                self.watcher.update()
        for number, state in self.ended.items():  # another controller may have finished it since
            if state.state != "finished":
                self.ended[number] = self.directory.state(number)

    @property
    def stops(self) -> bool:
        """Whether no further job starts."""
        return self._gives_up or (self._has_failed and self.stop_on_failure)

    @property
    def left(self) -> list[int]:
        """The numbers of jobs that are not over."""
        return sorted([*self._pending, *self._elsewhere, *(n for n, state in self.ended.items() if not state.is_over)])

    @property
    def failed(self) -> list[JobState]:
        """The jobs that have failed or were killed, by number."""
        states = [state for _, state in sorted(self.ended.items())]
        return [state for state in states if state.state == "failed" or not (state.is_over or self.signals)]

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

    def _start(self) -> None:
        """Start jobs while there is room."""
        while self._pending and not self.stops and len(self._running) + len(self._adopted) < self.shares.workers:
            number = self._pending[0]
            state = self._settle(number, None)
            if state.state == "running":
                self._adopt(state)
            elif state.is_over and self._repeated.get(number) != state.attempts:  # another controller has run it
                self._leave(state)
            elif not self._submit(state):
                return
            self._pending.remove(number)

    def _submit(self, state: JobState) -> bool:
        """Start a job. Return whether it was possible."""
        slots, number = self.shares.slots, state.number
        gpus = None if slots is None else slots.take(number)
        if slots is not None and gpus is None:
            return False
        folder, threads = str(self.directory.folder(number)), self.shares.threads
        request = Request(number, self.lines(number), folder, state.attempts, gpus, threads, self.environment)
        try:
            self.executor.submit(request)
        except UserError as error:
            self.problem = error
            self._give(number)
            return False
        self._running[number] = state.attempts + 1
        self.watcher.started(state)
        return True

    def _end(self, number: int, code: int | None) -> None:
        """Settle a job whose process has ended: retry it, or leave it as it is."""
        attempt = self._running.get(number)
        self._give(number)
        if self.signals:
            self._codes.add(code)
        state = self._settle(number, code, attempt)
        if code == NOT_RECORDED:
            self._set_unwritable()
        if (code == LEFT or state.state in ("running", "queued")) and not self._gives_up:  # another process has it
            self._adopt(state)
        elif state.state in ("failed", "interrupted") and not self.stops and self._retries[number] < self.max_retries:
            self._retries[number] += 1
            self._queue(state)
            self.watcher.ended(state)
        else:
            self._has_failed = self._has_failed or state.state in ("failed", "interrupted")
            self._leave(state)

    def _look_elsewhere(self) -> None:
        """Settle the jobs of other controllers that have ended."""
        if not self._elsewhere or time.monotonic() < self._looked + _LOOK:
            return
        for number in sorted(self._elsewhere):
            state = self._settle(number, None)
            if state.state == "running":
                continue
            self._give(number)
            if state.is_over:
                self._leave(state)
            else:
                self._queue(state)
        self._looked = time.monotonic()

    def _settle(self, number: int, code: int | None, attempt: int | None = None) -> JobState:
        """Return the state of a job; if it cannot be written, the one before."""
        try:
            return self.directory.settle(number, code, attempt)
        except (OSError, UserError):
            self._set_unwritable()
            return self.directory.state(number)

    def _set_unwritable(self) -> None:
        path = self.directory.path
        free = shutil.disk_usage(path).free
        problem = f"the state of a job could not be written to {path}, where {free / 1e6:.0f} MB are free"
        remedy = f"Free some space, and continue the sweep: sweep.resume={path}"
        self.problem = self.problem or UserError(problem, key="hydra.sweep.dir", remedy=remedy)

    def _queue(self, state: JobState) -> None:
        self._pending.append(state.number)
        if state.state == "failed":
            self._repeated[state.number] = state.attempts

    def _leave(self, state: JobState) -> None:
        self.ended[state.number] = state
        self.watcher.ended(state)

    def _adopt(self, state: JobState) -> None:
        """Watch a job that another controller has started."""
        self._elsewhere.add(state.number)
        if state.machine == machine() and sum(mark.machine == machine() for mark in self.directory.controllers()) < 2:
            self._adopted[state.number] = state
            if self.shares.slots is not None:
                self.shares.slots.hold(state.number, state.gpus)

    def _give(self, number: int) -> None:
        """Note that a job does not use this machine any more."""
        self._running.pop(number, None)
        self._adopted.pop(number, None)
        self._elsewhere.discard(number)
        if self.shares.slots is not None:
            self.shares.slots.give(number)

    def _pass_signals_on(self) -> None:
        """Send the first signal to all jobs, which save and end. Kill them after a second one."""
        if not self.signals:
            return
        if self._passed_on is None:
            self._passed_on = time.monotonic()
            del self.signals[1:]
            self._send(signal.Signals(self.signals[0]))
        elif len(self.signals) > 1:
            self._send(signal.SIGKILL)

    def _send(self, sign: signal.Signals) -> None:
        for number in self._running:
            self.executor.cancel(number, sign)
        for state in self._adopted.values():
            send(state.pid, state.since, sign)

    @contextmanager
    def _signals_noted(self) -> Iterator[None]:
        """In the body, note signals for the loop. Outside the main thread, and for ignored signals, do nothing."""

        def handle(number: int, frame: FrameType | None) -> None:
            if self._passed_on is None or time.monotonic() > self._passed_on + _SECOND:
                self.signals.append(number)

        numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]
        if threading.current_thread() is not threading.main_thread():
            numbers = []
        noted = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handle) for number in noted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _renew(self) -> None:
        if time.monotonic() > self._renewed + _RENEW:
            self._renewed = time.monotonic()
            self.directory.renew()
