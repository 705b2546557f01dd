"""Worker processes of loaders leave signals to the training process, which ends them."""

from __future__ import annotations

import atexit
import functools
import multiprocessing
import os
import signal
import weakref
from collections.abc import Callable, Iterable
from multiprocessing.context import ForkServerProcess
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from torch.utils.data._utils import signal_handling

from hydraloop.engine.signals import SIGNALS

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
