"""Ending: a rank that is told to end does so in an orderly way, and in any case soon.

A signal handler of Python's runs between two bytecodes, so a rank that waits in a collective of torch's for one that
has gone would never come to it. Python does write the number of each signal into a file descriptor at once; a thread
reads that, and ends the process when its time is up.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Self

from hydraloop.launch.outcome import Terminated

GRACE = 15.0
"""Seconds between being told to end and ending without further ado: enough to close trackers and to write
`result.json`, and half of what a job whose rank has died may take to end."""
_POLL = 0.5
"""Seconds between looks at the launching process, and at the clock."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Ending:
    """Started by a rank's main thread before anything else; stopped only where the process then is no rank any more.

    Args:
        last: called with the signal's number before the process is ended from outside its main thread.
        orphaned: called when the launching process has gone.
        grace: seconds, see `GRACE`.
    """

    def __init__(
        self,
        last: Callable[[int], None] = lambda number: None,
        orphaned: Callable[[], None] = lambda: None,
        grace: float = GRACE,
    ) -> None:
        self.asked = 0
        """The signal that told this rank to end; 0: none has."""
        self.is_closing: Callable[[], bool] = lambda: False
        """Whether the rank is ending anyway, so that a signal must not interrupt it."""
        self._last, self._orphaned, self._grace = last, orphaned, grace
        self._parent = os.getppid()
        self._deadline: float | None = None
        self._done = threading.Event()
        self._before: dict[int, Any] = {}

    def start(self) -> Self:
        """Handle SIGINT, SIGTERM and SIGHUP, and watch the launching process."""
        self._reads, self._writes = socket.socketpair()
        self._writes.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, self._handle) for number in _SIGNALS}
        os.register_at_fork(after_in_child=self._forget)
        self._watch = threading.Thread(target=self._run, name="hydraloop-ending", daemon=True)
        self._watch.start()
        return self

    def stop(self) -> None:
        """Put the handlers back."""
        self._done.set()
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        with contextlib.suppress(OSError):
            self._writes.send(b"\0")
        self._watch.join()
        self._reads.close()
        self._writes.close()

    def end_within_grace(self) -> None:
        """From now on, as if told to end."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or number
        if not self.is_closing():
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)

    def _forget(self) -> None:
        """In a forked process (a loader's): signals are its own affair."""
        if not self._done.is_set():
            signal.set_wakeup_fd(-1)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)

    def _run(self) -> None:
        orphaned = False
        while not self._done.is_set():
            ready, _, _ = select.select([self._reads], [], [], _POLL)
            numbers = [number for number in self._reads.recv(64) if number in _SIGNALS] if ready else []
            if numbers:
                self.asked = self.asked or numbers[0]
                self.end_within_grace()
            if not orphaned and os.getppid() != self._parent:
                orphaned = True
                self._orphaned()
                os.kill(os.getpid(), signal.SIGTERM)
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._last(self.asked)
                os._exit(128 + self.asked if self.asked else 1)


def leave(code: int) -> None:
    """End this process after a failure, at once: what torch.distributed does at its end may wait for lost ranks."""
    for child in multiprocessing.active_children():
        child.terminate()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
