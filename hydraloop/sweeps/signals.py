"""Signals: what a controller has received, and what it sends to its jobs because of it."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from hydraloop.launch.failure import REQUEUE

_SECOND = 0.5
"""Seconds after which a signal is a second one. A terminal that is closed sends SIGHUP several times."""


class Signals:
    """After the first signal, all jobs save and end; after a second one, they are killed."""

    def __init__(self) -> None:
        self.first: signal.Signals | None = None
        """What this process has received. None: no signal."""
        self.ends = set[int | None]()
        """Exit codes of the jobs that have ended since."""
        self._passed_on = 0.0
        """When the jobs got the first signal. 0: not yet."""
        self._kills = False

    @property
    def code(self) -> int:
        """The exit code of the command after a signal."""
        assert self.first is not None
        is_saved = REQUEUE in self.ends and self.ends <= {0, REQUEUE}
        return REQUEUE if is_saved else 128 + self.first

    def note(self, number: int) -> None:
        """Note a signal."""
        if self.first is None:
            self.first = signal.Signals(number)
        elif self._passed_on and time.monotonic() > self._passed_on + _SECOND:
            self._kills = True

    def to_send(self) -> signal.Signals | None:
        """Return the signal that the jobs are to get now. Each is returned once: with Slurm it is a command a job."""
        if self.first is not None and not self._passed_on:
            self._passed_on = time.monotonic()
            return signal.SIGTERM if self.first == signal.SIGHUP else self.first  # after which a run would not save
        kills, self._kills = self._kills, False
        return signal.SIGKILL if kills else None

    @contextmanager
    def noted(self) -> Iterator[None]:
        """In the body, note signals, except ignored ones. Outside the main thread, do nothing."""

        def handle(number: int, frame: FrameType | None) -> None:
            self.note(number)

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        is_main = threading.current_thread() is threading.main_thread()
        noted = [number for number in numbers if is_main and signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handle) for number in noted}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
