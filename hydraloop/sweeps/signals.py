"""Signals: which signal ends a sweep, and what its jobs get because of it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hydraloop.launch.exit import REQUEUE

_SECOND_AFTER = 0.5
"""Seconds after which a signal is a second one. A terminal that is closed sends SIGHUP several times."""


class Signals:
    """After the first signal, all jobs save and end. After a second one, they are killed."""

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The first signal that this process has received."""
        self.exit_codes = set[int | None]()
        """Exit codes of the jobs that have ended since."""
        self._forwarded_at: float | None = None
        """When the jobs got the first signal."""
        self._kill_jobs = False

    @property
    def exit_code(self) -> int:
        """The exit code of the command after a signal: REQUEUE if all jobs have saved, else 128 and the signal."""
        assert self.received is not None
        have_saved = REQUEUE in self.exit_codes and self.exit_codes <= {0, REQUEUE}
        return REQUEUE if have_saved else 128 + self.received

    def receive(self, number: int) -> None:
        """Remember a signal."""
        if self.received is None:
            self.received = signal.Signals(number)
        elif self._forwarded_at is not None and time.monotonic() > self._forwarded_at + _SECOND_AFTER:
            self._kill_jobs = True

    def to_forward(self) -> signal.Signals | None:
        """Return the signal that the jobs get now. Each is returned once: with Slurm it is a command for each job."""
        if self.received is not None and self._forwarded_at is None:
            self._forwarded_at = time.monotonic()
            # A run does not save after SIGHUP.
            return signal.SIGTERM if self.received == signal.SIGHUP else self.received
        if self._kill_jobs:
            self._kill_jobs = False
            return signal.SIGKILL
        return None

    @contextmanager
    def caught(self) -> Iterator[None]:
        """In the body, catch signals, except ignored ones. Outside the main thread, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def handle(number: int, frame: FrameType | None) -> None:
            self.receive(number)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        caught = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        handlers_before = {number: signal.signal(number, handle) for number in caught}
        try:
            yield
        finally:
            for number, handler in handlers_before.items():
                signal.signal(number, handler)
