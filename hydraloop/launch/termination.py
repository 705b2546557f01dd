"""Ending: a process that is told to end closes its run first, and ends soon in any case.

Python runs a signal handler between two bytecodes, so a rank that waits in a collective for a rank that has gone would
never run it. Python also writes the number of each signal into a file descriptor at once. A thread reads it, and ends
the process when its time is up.
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
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any, Self

from hydraloop.launch.outcome import Terminated

GRACE = 15.0
"""Seconds between being told to end and ending without further ado: enough to close trackers and to write
`result.json`, and half of what a job whose rank has died may take to end."""
_POLL = 0.5
"""Seconds between looks at the launching process, and at the clock."""
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Those that end a process without a word, unless it handles them."""


class Ending:
    """Used by the main thread. A rank starts it before anything else, and does not stop it while it is a rank.

    Args:
        last: called with the signal's number, from another thread, before the process is ended after its grace.
        orphaned: called when the launching process has gone.
        grace: seconds, see `GRACE`.
        launched: whether another process has started this one as a rank. False for a process that a user has started:
            it outlives its parent, Ctrl-C stays Python's, and a signal that is ignored (nohup) stays ignored. A
            launcher has looked after that already, and the signals that it sends are meant.
    """

    def __init__(
        self,
        last: Callable[[int], None] = lambda number: None,
        orphaned: Callable[[], None] = lambda: None,
        grace: float = GRACE,
        *,
        launched: bool = True,
    ) -> None:
        self.asked = 0
        """The signal that told this process to end; 0: none has."""
        self.is_closing: Callable[[], bool] = lambda: False
        """Whether the run is ending anyway, so that a signal must not interrupt it."""
        self._last, self._orphaned, self._grace, self._launched = last, orphaned, grace, launched
        self._parent = os.getppid()
        self._deadline: float | None = None
        self._done = threading.Event()
        self._before: dict[int, Any] = {}

    def start(self) -> Self:
        """Handle the signals, and watch the launching process. Outside the main thread nothing is handled."""
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reads, self._writes = socket.socketpair()
        self._writes.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
        self._numbers = [signal.SIGINT, *_SIGNALS] if self._launched else _not_ignored()
        self._before = {number: signal.signal(number, self._handle) for number in self._numbers}
        _at_fork(self._numbers, self._forget)
        self._watch = threading.Thread(target=self._run, name="hydraloop-ending", daemon=True)
        self._watch.start()
        return self

    def stop(self) -> None:
        """Put the handlers back."""
        if not self._before:
            return
        self._done.set()
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        with contextlib.suppress(OSError):
            self._writes.send(b"\0")
        self._watch.join()
        self._reads.close()
        self._writes.close()
        # The handler that a fork calls cannot be taken back, and would keep the run's model in memory.
        self.is_closing, self._last, self._orphaned = lambda: False, lambda number: None, lambda: None

    def end_within_grace(self) -> None:
        """From now on, as if told to end."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.asked = self.asked or number
        # A loader's workers may have got the signal, too: that they end is no error to raise in the middle of closing.
        self._before.setdefault(signal.SIGCHLD, signal.signal(signal.SIGCHLD, signal.SIG_DFL) or signal.SIG_DFL)
        if not self.is_closing():
            raise KeyboardInterrupt if number == signal.SIGINT else Terminated(number)

    def _forget(self) -> None:
        """In a forked process (a loader's worker): it handles its signals itself."""
        if not self._done.is_set():
            signal.set_wakeup_fd(-1)
            for number in self._before:
                signal.signal(number, signal.SIG_DFL)

    def _run(self) -> None:
        orphaned = False
        while not self._done.is_set():
            ready, _, _ = select.select([self._reads], [], [], _POLL)
            numbers = [number for number in self._reads.recv(64) if number in self._numbers] if ready else []
            if numbers:
                self.asked = self.asked or numbers[0]
                self.end_within_grace()
            if self._launched and not orphaned and os.getppid() != self._parent:
                orphaned = True
                self._orphaned()
                os.kill(os.getpid(), signal.SIGTERM)
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._last(self.asked)
                os._exit(128 + self.asked if self.asked else 1)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """In the body, SIGTERM and SIGHUP raise `Terminated` in the main thread, as Ctrl-C raises `KeyboardInterrupt`.

    For what a command does before, between and after its runs. An ignored signal stays ignored, and outside the main
    thread nothing changes. A handler that the body leaves (a rank's) stays.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    def put_back() -> None:
        for number, handler in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in _not_ignored()}
    _at_fork(before, put_back)
    try:
        yield
    finally:
        put_back()


def _at_fork(numbers: Iterable[int], forget: Callable[[], None]) -> None:
    """Call `forget`, which removes the handlers of these signals, in each process that this one forks.

    The signals are blocked meanwhile. Otherwise Python would discard a signal that the new process gets before, and
    would also report it to this process, which shares the wakeup file descriptor.
    """
    numbers = list(numbers)
    masks = threading.local()

    def block() -> None:
        masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, masks.before)

    def in_child() -> None:
        forget()
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=in_child)


def _not_ignored() -> list[signal.Signals]:
    return [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def leave(code: int) -> None:
    """End this process after a failure, at once: what torch.distributed does at its end may wait for lost ranks."""
    for child in multiprocessing.active_children():
        child.terminate()
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
