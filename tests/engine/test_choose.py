"""The device of a run becomes the current device, also in the thread that saves."""

from __future__ import annotations

import threading

import pytest
import torch

from hydraloop.engine.checkpoint.saver import Saver
from hydraloop.engine.distributed.comm import Distributed, choose_device


@pytest.fixture
def current(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Two GPUs that are not there. Return the current one by the name of the thread."""
    found: dict[str, int] = {}

    def set_index(index: int) -> None:
        found[threading.current_thread().name] = index

    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "set_device_index", set_index)
    monkeypatch.setattr(
        torch.accelerator, "current_device_index", lambda: found.get(threading.current_thread().name, 0)
    )
    return found


@pytest.mark.parametrize(
    ("wanted", "local_rank", "expected"),
    [("cuda:1", None, "cuda:1"), ("auto", 1, "cuda:1"), ("cuda", 1, "cuda:1"), ("cuda:0", 1, "cuda:0")],
)
def test_a_device_with_a_number_becomes_the_current_one(
    current: dict[str, int], wanted: str, local_rank: int | None, expected: str
) -> None:
    device = choose_device(wanted, local_rank=local_rank)
    assert device == torch.device(expected)
    assert current == {"MainThread": device.index}


@pytest.mark.parametrize("wanted", ["auto", "cuda", "cpu", "cpu:0"])
def test_a_device_without_a_number_leaves_the_current_one(current: dict[str, int], wanted: str) -> None:
    choose_device(wanted)
    assert current == {}


def test_the_thread_that_saves_uses_the_device_of_the_run(current: dict[str, int]) -> None:
    choose_device("cuda:1")
    saver, used = Saver(Distributed(), lambda: None), []

    def write(checkpoint: object) -> bool:
        used.append(torch.accelerator.current_device_index())
        return True

    saver.start({}, write, lambda written: None, asynchronous=True)
    assert saver.wait()
    saver.close()
    assert used == [1]


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_nothing_is_allocated_on_the_first_gpu() -> None:
    before = torch.cuda.memory_reserved(0)
    choose_device("cuda:1")
    try:
        assert torch.empty(2**20, device="cuda").device.index == 1
        assert torch.cuda.memory_reserved(0) == before
    finally:
        torch.accelerator.set_device_index(0)
