"""Signals preempt a run: it saves at the end of the accumulation window and ends, so that it can be continued.

A handler runs between two bytecodes of the main thread, wherever that is. So it only sets attributes of the requests,
and writes to the terminal without a lock.
"""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from torch.utils.data._utils import signal_handling

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


_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
_started: weakref.WeakSet[BaseProcess] = weakref.WeakSet()  # multiprocessing keeps those that run


class QuietWorker:
    """A `worker_init_fn`: the worker then does nothing at a signal that preempts a run.

    Slurm and terminals send signals to all processes. The run still needs its workers, for the iterations before it
    saves. Processes that a data set starts receive signals as usual. A worker whose training process was killed before
    this call ends: torch's watchdog would take the adopting process for its parent.

    Args:
        init: called with the worker's number; None: nothing is called.
    """

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self.init = init

    def __call__(self, worker: int) -> None:
        for number in SIGNALS:
            signal.signal(number, _do_nothing)  # SIG_IGN would also hold in processes that the data set starts
            signal.siginterrupt(number, False)
        parent, server = (
            multiprocessing.parent_process(),
            isinstance(multiprocessing.current_process(), ForkServerProcess),
        )
        if parent is not None and not server and os.getppid() != parent.pid:
            os._exit(1)
        if self.init is not None:
            self.init(worker)


def ended_at_exit(loader: Iterable[Any]) -> Any:
    """Return the iterator of a DataLoader. If its workers still run when this process exits, they are ended.

    Otherwise `multiprocessing` would send them SIGTERM and wait forever. This includes workers that had started when
    the iterator failed.
    """
    leave_deaths_to_the_loader()
    before = multiprocessing.active_children()
    try:
        batches = iter(loader)
    finally:
        started: list[Any] = [child for child in multiprocessing.active_children() if child not in before]
        for worker in started:
            # torch ends a worker that hangs with SIGTERM, at which it does nothing. A bound method would be a cycle:
            # the pipes of an ended worker would stay open until they are collected.
            worker.terminate = functools.partial(type(worker).kill, weakref.proxy(worker))
        _started.update(started)
    if hasattr(batches, "_workers"):  # the iterator of the class without workers has none
        _iterators.add(batches)
    return batches


def leave_deaths_to_the_loader() -> None:
    """Make torch's loaders find a worker that died by their own check, 5 s later (after their `timeout`, if they have
    one), as on Windows.

    On Linux, torch also sets a handler of SIGCHLD that raises an error wherever the main thread is. Inside `queue.put`,
    a lock would stay taken, for which `multiprocessing` waits forever at exit.
    """
    signal_handling._SIGCHLD_handler_set = True  # there is no public way to leave it out


@atexit.register  # runs before what torch and multiprocessing have registered
def _end() -> None:
    for batches in list(_iterators):
        batches._shutdown_workers()
    for worker in list(_started):  # also one that hangs in a sample
        if worker.is_alive():
            worker.kill()


def _do_nothing(number: int, frame: FrameType | None) -> None: ...
