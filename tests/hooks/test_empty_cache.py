"""EmptyCacheHook: when it empties the cache of the run's device; on a CPU, it logs that there is none.

The runs compute on the CPU; what is not real is the accelerator. torch's `empty_cache` of it is replaced by one that
writes down when it is called, and the engine is told, after it was built, that it is on such a device.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.hooks.memory import EmptyCacheHook
from tests.helpers import Recorder
from tests.hooks.tiny_runs import engine_of


def _trace(monkeypatch: pytest.MonkeyPatch, run_dir: Path, device: str = "cuda", **options: bool) -> list[str]:
    """Mount points and calls of one epoch of two iterations with validation and test, in their order."""
    trace: list[str] = []
    if device != "cpu":
        monkeypatch.setattr(torch.get_device_module(device), "empty_cache", lambda: trace.append("EMPTY"))
    hooks: dict[str, Hook] = {"recorder": Recorder(trace), "empty_cache": EmptyCacheHook(**options)}
    engine = _on(engine_of(run_dir, hooks, test=True, max_epochs=1, train=_two()), device)
    engine.train()
    return trace


def _two() -> list[Any]:
    return [(torch.randn(4, 3), torch.randn(4, 2))] * 2


def _on(engine: Engine, device: str) -> Engine:
    object.__setattr__(engine.run, "device", torch.device(device))
    return engine


def _called_after(trace: list[str]) -> list[str]:
    return [trace[index - 1].split()[0] for index, entry in enumerate(trace) if entry == "EMPTY"]


AFTER_EPOCH = ["after_train_epoch", "after_val_epoch", "after_test_epoch"]


@pytest.mark.parametrize("device", ["cuda", "xpu"])
def test_by_default_after_each_epoch(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _called_after(_trace(monkeypatch, tmp_path, device)) == AFTER_EPOCH


def test_before_each_epoch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = _trace(monkeypatch, tmp_path, before_epoch=True, after_epoch=False)
    assert _called_after(trace) == ["before_train_epoch", "before_val_epoch", "before_test_epoch"]


def test_after_each_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = _trace(monkeypatch, tmp_path, after_iter=True, after_epoch=False)
    assert _called_after(trace) == ["after_train_iter"] * 2 + ["after_val_iter"] * 2 + ["after_test_iter"] * 2


def test_on_a_cpu_it_says_once_that_there_is_nothing_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    assert _called_after(_trace(monkeypatch, tmp_path, "cpu", before_epoch=True, after_iter=True)) == []
    assert caplog.text.count("hooks.empty_cache: this run is on the CPU, where torch caches no memory") == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")
def test_on_a_gpu_cached_memory_is_given_back(tmp_path: Path) -> None:
    engine_of(tmp_path / "first", {}, device="cuda").train()  # cuBLAS would keep its workspace in the large block
    engine = engine_of(tmp_path, {"empty_cache": EmptyCacheHook()}, device="cuda")
    filling = torch.empty(2**26, device="cuda")
    del filling
    before = torch.cuda.memory_reserved()
    engine.train()
    assert torch.cuda.memory_reserved() <= before - 2**27
