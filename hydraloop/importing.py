"""While hydraloop is imported or starts: signals wait, and garbage is not collected.

Imports almost nothing itself: it cannot do anything about a signal that comes earlier.
"""

from __future__ import annotations

import gc
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType, TracebackType


@contextmanager
def deferred() -> Iterator[None]:
    """Handle signals that come in the body, which imports, after it. Outside the main thread, nothing changes.

    An import that a signal interrupts may end with any error, because libraries catch the interruption, and some cannot
    be imported again.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[signal.Signals] = []

    def note(number: int, frame: FrameType | None) -> None:
        received.append(signal.Signals(number))

    before = {}
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        handler = signal.getsignal(number)
        if callable(handler):
            before[number] = handler
            signal.signal(number, note)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        with in_one_line():
            for number in received[:1]:
                before[number](number, None)


@contextmanager
def in_one_line() -> Iterator[None]:
    """If Ctrl-C in the body ends the process, let it print one line and exit with code 130.

    An interactive interpreter continues, and shows the traceback.
    """
    try:
        yield
    except KeyboardInterrupt:
        if not hasattr(sys, "ps1"):
            sys.excepthook = _show
        raise


def _show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
        return
    print("interrupted by Ctrl-C (SIGINT)", file=sys.stderr)
    sys.exit(130)


@contextmanager
def uncollected() -> Iterator[None]:
    """Import in the body: without the garbage collector, from which all objects are hidden then, and without signals.

    It would go through the objects of torch many times while torch is imported, and again during training. That
    takes a fifth of the CPU time of a short run. Call it only in processes of hydraloop's own.
    """
    imported, collects = len(sys.modules), gc.isenabled()
    gc.disable()
    try:
        with deferred():
            yield
    finally:
        if len(sys.modules) > imported:
            gc.freeze()
        if collects:
            gc.enable()
