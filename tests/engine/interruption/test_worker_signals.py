"""Workers do nothing at signals that ask a run to stop; the training process ends them, also at its exit."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hydraloop.data import build_loader
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
