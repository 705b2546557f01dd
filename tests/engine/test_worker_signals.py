"""Workers do nothing at signals that ask a run to stop; the training process ends them, also at its exit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hydraloop.data import build_loader
from hydraloop.engine.signals import QuietWorker
from tests.data.streams import stream_loader


class Numbers(Dataset[Tensor]):
    """As a data set or a stream."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        child = subprocess.run([sys.executable, "-S", "-c", "print()"], check=True) if index == 11 else None
        return torch.tensor(index if child is None else child.returncode)

    def __iter__(self) -> Any:
        return iter(self[index] for index in range(12))


@pytest.mark.parametrize("kind", ["indices", "stream"])
def test_a_worker_continues_after_signals(kind: str) -> None:
    loader: Iterable[Any] = (
        build_loader(Numbers(), shuffle=False, batch_size=2, num_workers=1, persistent_workers=False)
        if kind == "indices"
        else stream_loader(Numbers(), train=False, batch_size=2, num_workers=1)
    )
    before = multiprocessing.active_children()
    batches = iter(loader)
    found = [next(batches).tolist()]
    (worker,) = (child for child in multiprocessing.active_children() if child not in before)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
        os.kill(worker.pid or 0, number)
    found += [batch.tolist() for batch in batches]
    assert found == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 0]]


def begin_late(pipe: int) -> None:
    """The start of a worker whose parent is killed before torch's watchdog notes the parent."""
    parent = os.getppid()
    os.write(pipe, b"started ")
    while os.getppid() == parent:
        time.sleep(0.01)
    QuietWorker(None)(0)
    os.write(pipe, b"lives")


def test_a_worker_whose_parent_was_killed_first_ends() -> None:
    context = multiprocessing.get_context("fork")
    read, write = os.pipe()
    if (parent := os.fork()) == 0:
        try:
            context.Process(target=begin_late, args=(write,)).start()
            time.sleep(60)
        finally:
            os._exit(1)
    os.close(write)
    assert os.read(read, 100) == b"started "
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    assert os.read(read, 100) == b""  # its end
    os.close(read)


FAILED = """
import multiprocessing
from multiprocessing.process import BaseProcess
from hydraloop.data import build_loader

ready, start, started = multiprocessing.Event(), BaseProcess.start, []

def fail_second(process):
    if started:
        assert ready.wait(30)
        raise RuntimeError("of a signal handler")
    start(process)
    started.append(process)

BaseProcess.start = fail_second
loader = build_loader(
    list(range(9)), shuffle=False, batch_size=2, num_workers=2, worker_init_fn=lambda number: ready.set()
)
try:
    iter(loader)
except RuntimeError as error:
    print(error)
    failed = error  # with its frames, and so with the iterator of torch, up to the end
"""


@pytest.mark.slow
def test_a_process_exits_after_an_error_while_workers_start() -> None:
    done = subprocess.run([sys.executable, "-c", FAILED], timeout=30, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "of a signal handler\n"), done.stderr


KILLED = """
import multiprocessing.queues as queues, os, signal, time
from hydraloop.data import build_loader

class Breaking:  # kills a worker while the main thread has taken the lock of a queue, and has not yet entered its body
    def __init__(self, condition):
        self.condition = condition
    def __enter__(self):
        self.condition.__enter__()
        queue._notempty = self.condition
        os.kill(batches_of[0]._workers[0].pid, signal.SIGKILL)
        time.sleep(0.5)
    def __getattr__(self, name):
        return getattr(self.condition, name)
    def __exit__(self, *error):
        self.condition.__exit__(*error)

batches_of = []
loader = build_loader(list(range(90)), shuffle=False, batch_size=2, num_workers=2)
batches = iter(loader)
print(next(batches))
batches_of += [item for item in __import__("gc").get_objects() if hasattr(type(item), "_shutdown_workers")]
queue = batches_of[0]._index_queues[1]
queue._notempty = Breaking(queue._notempty)
try:
    list(batches)
except RuntimeError as error:
    print("exited unexpectedly" in str(error))
"""


@pytest.mark.slow
def test_a_worker_that_is_killed_leaves_no_lock_taken() -> None:
    """An error that a signal handler raises inside `queue.put` would: then the process never exits."""
    done = subprocess.run([sys.executable, "-c", KILLED], timeout=30, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "tensor([0, 1])\nTrue\n", "")


@pytest.mark.slow
def test_a_process_that_leaves_its_workers_exits() -> None:
    code = (
        "from hydraloop.data import build_loader\n"
        "loader = build_loader(list(range(9)), shuffle=False, batch_size=2, num_workers=1)\n"
        "batches = iter(loader)\n"
        "print(next(batches))"
    )
    done = subprocess.run([sys.executable, "-c", code], timeout=120, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "tensor([0, 1])\n", "")
