"""MemoryProfilerHook: what it reads, when, and where it reports."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from hydraloop.engine.hook import Hook
from hydraloop.hooks.logger import LoggerHook
from hydraloop.hooks.memory import MemoryProfilerHook, device_memory
from tests.helpers import HostSyncs, batches, logged, make_engine

HOST = (
    "available_memory", "used_memory", "memory_utilization", "available_swap_memory", "used_swap_memory",
    "swap_memory_utilization", "current_process_memory",
)  # fmt: skip
LINE = re.compile(
    r"Memory information available_memory: \d+ MiB, used_memory: \d+ MiB, memory_utilization: \d+\.\d %, "
    r"available_swap_memory: \d+ MiB, used_swap_memory: \d+ MiB, swap_memory_utilization: \d+\.\d %, "
    r"current_process_memory: \d+ MiB"
)
"""MMDetection's, up to its one decimal place."""


def _ran(run_dir: Path, hook: Hook, **settings: Any) -> list[dict[str, Any]]:
    """The records with memory in them, of two epochs of four iterations, with three batches to validate on and two to
    test on."""
    run_dir.mkdir(exist_ok=True)
    hooks = {"memory_profiler": hook, "logger": LoggerHook(interval=2)}
    make_engine(
        run_dir, hooks, train=batches(4), val=batches(3), test=batches(2), **{"max_epochs": 2, **settings}
    ).train()
    records = logged(run_dir / "metrics.jsonl")
    return [record for record in records if "used_memory" in record]


def test_the_documented_fields_are_in_the_records(tmp_path: Path) -> None:
    record = _ran(tmp_path, MemoryProfilerHook(interval=3))[0]
    assert list(record) == ["mode", "epoch", "iteration", *HOST]
    memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    assert 0 < record["available_memory"] + record["used_memory"] <= memory.total / 2**20
    assert 0 < record["memory_utilization"] <= 100
    assert record["available_swap_memory"] + record["used_swap_memory"] == pytest.approx(swap.total / 2**20, abs=1)
    assert 0 <= record["swap_memory_utilization"] <= 100
    own = psutil.Process().memory_info().rss / 2**20
    assert 0.3 * own < record["current_process_memory"] < 3 * own


def test_training_counts_iterations_and_evaluations_their_batches(tmp_path: Path) -> None:
    def due(interval: int) -> list[tuple[str, int, int]]:
        records = _ran(tmp_path / str(interval), MemoryProfilerHook(interval=interval))
        return [(record["mode"], record["epoch"], record["iteration"]) for record in records]

    assert due(3) == [("train", 1, 3), ("val", 1, 4), ("train", 2, 6), ("val", 2, 8)]
    assert due(2) == [
        ("train", 1, 2), ("train", 1, 4), ("val", 1, 4), ("train", 2, 6), ("train", 2, 8), ("val", 2, 8), ("test", 2, 8)
    ]  # fmt: skip
    assert due(5) == [("train", 2, 5)], "epochs shorter than the interval also report"


def test_one_line_in_the_log_in_mmdetections_words(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    records = _ran(tmp_path, MemoryProfilerHook(interval=5))
    lines = [record.getMessage() for record in caplog.records if "used_memory" in record.getMessage()]
    assert len(lines) == len(records) == 1
    assert LINE.fullmatch(lines[0])
    assert f"current_process_memory: {records[0]['current_process_memory']:.0f} MiB" in lines[0]


def test_the_devices_memory_is_what_torch_says(monkeypatch: pytest.MonkeyPatch) -> None:
    assert device_memory(torch.device("cpu")) == {}
    asked: list[torch.device] = []

    def answer(device: torch.device) -> int:
        asked.append(device)
        return len(asked) * 3 * 2**20

    module = SimpleNamespace(memory_allocated=answer, memory_reserved=answer)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    device = torch.device("cuda:1")
    assert device_memory(device) == {"allocated_device_memory": 3, "reserved_device_memory": 6}
    assert asked == [device, device]


def test_no_host_sync(tmp_path: Path) -> None:
    hook = MemoryProfilerHook(interval=1)
    engine = make_engine(tmp_path, {"memory_profiler": hook}, train=batches(4))
    with HostSyncs() as syncs:
        engine.train()
    assert syncs.count == 2, "only the losses and the weights are checked, at the end"
