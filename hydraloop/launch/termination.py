"""Ending processes: signals that end this one become exceptions, other processes get signals or are killed."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from types import FrameType
from typing import Any, Self

from hydraloop.errors import Terminated, interrupt

GRACE = 15.0
"""Seconds from the signal to the end of the process: enough to close trackers and to write `result.json`, and half of
the 30 s that a job may take to end after a rank was killed."""
_POLL = 0.5
"""Seconds between two checks of the parent process and of the grace period."""
_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process without a message unless it handles them."""


class TerminationHandler:
    """Raises signals in the main thread, as `KeyboardInterrupt` or `Terminated`, and limits the time until the end.

    Args:
        on_timeout: called from another thread with the number of the signal, when the grace period is over and the
            process is about to be ended.
        is_closing: whether the run is ending, so that a signal must not interrupt it.
        is_saving: whether the run was preempted and saves. Until it has ended or failed, there is no limit of time.
        grace: seconds, see `GRACE`.
        launched: whether a launcher has started this process as a rank. Otherwise, it does not handle Ctrl-C, and
            leaves ignored signals (nohup) ignored.
    """

    def __init__(
        self,
        *,
        on_timeout: Callable[[int], None] = lambda number: None,
        is_closing: Callable[[], bool] = lambda: False,
        is_saving: Callable[[], bool] | None = None,
        grace: float = GRACE,
        launched: bool = True,
    ) -> None:
        self.received = 0
        """The first signal that this process has received; 0 if none."""
        self._on_timeout = on_timeout
        self._is_closing = is_closing
        self._is_saving = is_saving or (lambda: False)
        self._grace = grace
        self._launched = launched
        self._deadline: float | None = None
        self._stopped = threading.Event()
        self._before: dict[int, Any] = {}
        """The earlier handlers of the signals."""

    def start(self) -> Self:
        """Handle the signals. Outside the main thread, do nothing."""
        if threading.current_thread() is not threading.main_thread():
            return self
        self._reads, self._writes = socket.socketpair()
        self._reads.settimeout(_POLL)  # unlike `select`, also with more than 1,024 open files
        self._writes.setblocking(False)
        self._wakeup_before = signal.set_wakeup_fd(self._writes.fileno(), warn_on_full_buffer=False)
        self._numbers = [signal.SIGINT, *_SIGNALS] if self._launched else _not_ignored()
        self._before = {number: signal.signal(number, self._handle) for number in self._numbers}
        self._watch = threading.Thread(target=self._run, name="hydraloop-termination", daemon=True)
        self._watch.start()
        return self

    def stop(self) -> None:
        """Restore the signal handlers."""
        if not self._before:
            return
        self._stopped.set()
        signal.set_wakeup_fd(self._wakeup_before)
        for number, handler in self._before.items():
            signal.signal(number, handler)
        with suppress(OSError):
            self._writes.send(b"\0")
        self._watch.join()
        self._reads.close()
        self._writes.close()

    def end_within_grace(self) -> None:
        """Start the grace period, as a signal does."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self._grace

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number
        if not self._is_closing():
            raise interrupt(number)

    def _run(self) -> None:
        while not self._stopped.is_set():
            signals = self._new_signals()
            if signals:
                self.received = self.received or signals[0]
                self.end_within_grace()
            if self._deadline is not None and self._is_saving():
                self._deadline = time.monotonic() + self._grace
            if self._deadline is not None and time.monotonic() > self._deadline:
                self._on_timeout(self.received or signal.SIGTERM)
                os._exit(128 + self.received if self.received else 1)

    def _new_signals(self) -> list[int]:
        """Return the handled signals that this process has got, or none after `_POLL` seconds."""
        received = b""
        with suppress(TimeoutError):
            received = self._reads.recv(64)
        return [number for number in received if number in self._numbers]


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """In the body, raise SIGTERM and SIGHUP as `Terminated` in the main thread.

    For a command before, between and after its runs. An ignored signal stays ignored. A handler that the body installs
    (a rank's) is not removed. Outside the main thread, nothing changes.
    """

    def handle(number: int, frame: FrameType | None) -> None:
        raise Terminated(number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handle) for number in _not_ignored()}
    try:
        yield
    finally:
        for number, handler in before.items():
            if signal.getsignal(number) is handle:
                signal.signal(number, handler)


def _not_ignored() -> list[signal.Signals]:
    return [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def watch_parent(parent: int, on_end: Callable[[], None]) -> None:
    """Call a function when the process that has started this one ends, or if it has ended before this call.

    Args:
        parent: its process ID.
        on_end: called from another thread, which looks twice a second.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL)
        on_end()

    threading.Thread(target=watch, name="hydraloop-parent", daemon=True).start()


def end_with(parent: int) -> None:
    """Send SIGTERM to this process when its parent ends. For a job that only its controller restarts."""
    _owner.append(parent)
    watch_parent(parent, lambda: os.kill(os.getpid(), signal.SIGTERM))


def owner_has_ended() -> bool:
    """Return whether the process that `end_with` has named has ended."""
    return bool(_owner) and os.getppid() != _owner[-1]


_owner: list[int] = []


# Forked processes (a loader's workers) do not inherit the handlers above. The signals are blocked during a fork:
# otherwise, Python would discard a signal that the new process gets before its handlers are reset, and would report it
# to this process too, as both share the wakeup file descriptor.
_masks = threading.local()


def _block() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, (signal.SIGINT, *_SIGNALS))


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _reset() -> None:
    for number in (signal.SIGINT, *_SIGNALS):
        if getattr(signal.getsignal(number), "__module__", None) == __name__:
            signal.signal(number, signal.SIG_DFL)
            signal.set_wakeup_fd(-1)
    _unblock()


os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_reset)


_SAME = 2.0
"""Seconds by which two measurements of a start may differ; the start of the machine is known to a second."""


def started(pid: int) -> float | None:
    """Return the seconds from the start of the machine to that of a process; None if it does not exist or is a zombie.

    The number does not change when the clock is set.
    """
    import psutil  # 15 ms, which --help and --dry-run do without

    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        boot = psutil.boot_time()  # first: psutil 5.9 adds what this function last returned, before the clock was set
        return float(process.create_time() - boot)
    except psutil.Error:
        return None


def is_alive(pid: int, since: float | None) -> bool:
    """Return whether a process still exists. A process that has ended and was not waited for does not count.

    Args:
        since: what `started` returned for it.
    """
    now = started(pid)
    return now is not None and since is not None and abs(now - since) < _SAME


def kill_tree(pid: int) -> None:
    """Kill a process and all that it has started, also those with a session of their own, such as ranks."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        root = psutil.Process(pid)
        # This process last, so that it can kill the others. Otherwise the root first: it must not see how they end.
        for process in sorted([root, *root.children(recursive=True)], key=lambda found: found.pid == os.getpid()):
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)


def send(pid: int, since: float | None, sign: signal.Signals) -> None:
    """Send a signal to a process, unless it has ended. SIGKILL also ends all that it has started.

    Args:
        since: what `started` returned for it.
    """
    if not is_alive(pid, since):
        return
    if sign is signal.SIGKILL:
        kill_tree(pid)
    else:
        with suppress(ProcessLookupError):
            os.kill(pid, sign)
