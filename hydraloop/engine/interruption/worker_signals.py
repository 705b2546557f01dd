"""Worker processes of loaders leave signals to the training process, which ends them."""

from __future__ import annotations

import atexit
import signal
import weakref
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any, TypeVar

from hydraloop.engine.interruption.signals import SIGNALS

_Batches = TypeVar("_Batches")
_iterators: weakref.WeakSet[Any] = weakref.WeakSet()
_started: list[BaseProcess] = []


class QuietWorker:
    """A `worker_init_fn`: the worker then does nothing at a signal that preempts a run.

    Slurm and terminals send signals to all processes. The run still needs its workers, for the iterations before it
    saves. Processes that a data set starts receive signals as usual.

    Args:
        init: called with the worker's number; None: nothing is called.
    """

    def __init__(self, init: Callable[[int], object] | None) -> None:
        self.init = init

    def __call__(self, worker: int) -> None:
        for number in SIGNALS:
            signal.signal(number, _do_nothing)  # SIG_IGN would also hold in processes that the data set starts
            signal.siginterrupt(number, False)
        if self.init is not None:
            self.init(worker)


def ended_at_exit(batches: _Batches) -> _Batches:
    """Return the iterator of a DataLoader. If its workers still run when this process exits, they are ended.

    Otherwise `multiprocessing` would send them SIGTERM and wait forever.
    """
    workers: list[Any] = getattr(batches, "_workers", [])  # the iterator of the class without workers has none
    if workers:
        _iterators.add(batches)
        for worker in workers:
            worker.terminate = worker.kill  # torch ends a worker that hangs with SIGTERM, at which it does nothing
        _started[:] = [*(worker for worker in _started if worker.is_alive()), *workers]
    return batches


@atexit.register  # runs before what torch and multiprocessing have registered
def _end() -> None:
    for batches in list(_iterators):
        batches._shutdown_workers()
    for worker in _started:  # also one that hangs in a sample
        if worker.is_alive():
            worker.kill()


def _do_nothing(number: int, frame: FrameType | None) -> None: ...
