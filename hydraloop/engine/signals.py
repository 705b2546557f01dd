"""Signals preempt a run: it saves at the end of the accumulation window and ends, so that it can be continued.

A handler runs between two bytecodes of the main thread, wherever that is. So it only sets attributes of the requests,
and writes to the terminal without a lock.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from hydraloop.engine.requests import Requests

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
_COPY = 0.5
"""Seconds after a signal in which SIGINT is a copy of it: a terminal sends Ctrl-C to all processes of a group, and a
launcher passes it on."""


@contextmanager
def preemptible(requests: Requests, has_failed: Callable[[], bool]) -> Iterator[None]:
    """In the body, let signals preempt the training. Ignored signals, and those that C code handles, stay as they are.

    After the body, if a signal has come, the Python function that handled it before is called: with Ctrl-C, Python's
    own, which raises KeyboardInterrupt. Outside the main thread, nothing changes.

    Args:
        requests: of the run.
        has_failed: whether the run has an error. Then the earlier handlers are called.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _Handler(requests, has_failed)
    try:
        yield
    finally:
        handler.remove()
    handler.call_earlier()


class _Handler:
    """Handles signals while a run trains. Before training and in after_run, the earlier handlers are called."""

    def __init__(self, requests: Requests, has_failed: Callable[[], bool]) -> None:
        self._requests, self._has_failed, self._process = requests, has_failed, os.getpid()
        self._received, self._at = 0, 0.0
        earlier = {number: signal.getsignal(number) for number in SIGNALS}
        self._earlier = {number: one for number, one in earlier.items() if one not in (None, signal.SIG_IGN)}
        for number in self._earlier:
            signal.signal(number, self._handle)

    def remove(self) -> None:
        """Restore the earlier handlers, except where the body has set another one."""
        for number, handler in self._earlier.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, handler)

    def call_earlier(self) -> None:
        """Call the function that handled the received signal before, unless it is hydraloop's own."""
        handler: Any = self._earlier.get(signal.Signals(self._received)) if self._received else None
        if callable(handler) and not str(getattr(handler, "__module__", "")).startswith("hydraloop."):
            handler(self._received, None)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        name = signal.Signals(number).name
        if os.getpid() != self._process:  # forked: a signal ends it, as without this handler
            _send_default(number)
        elif self._received:
            if number == signal.SIGINT and time.monotonic() > self._at + _COPY:
                self._at = time.monotonic()
                raise KeyboardInterrupt
        elif self._requests.preemptible and not self._has_failed():
            self._received, self._at = number, time.monotonic()
            self._requests.preempt(name)
            hint = "; press Ctrl-C again to end it at once" if number == signal.SIGINT else ""
            os.write(2, f"{name}: the run saves and ends{hint}\n".encode())
        else:
            earlier: Any = self._earlier[signal.Signals(number)]
            if callable(earlier):
                earlier(number, frame)
            else:
                _send_default(number)


def _send_default(number: int) -> None:
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
