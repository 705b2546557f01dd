"""IterTimerHook on real runs whose clock is a number: loading takes 3 s, a step 1 s, everything else far longer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hydraloop.engine import batches as batches_module
from hydraloop.engine import hook_order, requests
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.hooks import timer
from hydraloop.hooks.timer import IterTimerHook
from hydraloop.tasks.task import Task
from tests.helpers import at
from tests.hooks.tiny_runs import engine_of


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class SlowBatches:
    """Four batches, three seconds each."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[Any]:
        for _ in range(4):
            self._clock.now += 3
            yield torch.ones(2, 2), torch.ones(2, 1)


class SlowTask(Task):
    """A training step takes a second, or more if `slow`; a validation batch a hundred."""

    clock: Clock
    slow: Mapping[int, float]
    count = 0

    def forward(self, batch: Any) -> dict[str, Any]:
        if self.training:  # an evaluation calls it too
            self.count += 1
            self.clock.now += 1 + self.slow.get(self.count, 0.0)
        return super().forward(batch)

    def evaluate(self, batch: Any) -> dict[str, Any]:
        self.clock.now += 100
        return super().evaluate(batch)


class Watcher(Hook):
    """Keeps the timer's facts after each iteration; slow after an epoch, and in a checkpoint after iteration 2."""

    priority = 60

    def __init__(self, clock: Clock, *, save: bool) -> None:
        self._clock, self._save = clock, save
        self.means: list[dict[str, float]] = []
        self.etas: list[float] = []

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        self.means.append(engine.messages.means())
        self.etas.append(engine.messages.read("eta"))
        if self._save and engine.progress.iteration == 2:
            engine.request_checkpoint("slow", self._write)

    def after_train_epoch(self, engine: Engine) -> None:
        self._clock.now += 500

    def _write(self, engine: Engine) -> None:
        engine.checkpoints.save(engine.run_dir / "slow.pth")
        self._clock.now += 1000


def _run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    save: bool = False,
    slow: Mapping[int, float] | None = None,
    busy: tuple[str, int] | None = None,
    copying: float = 0.0,
    **settings: Any,
) -> tuple[Engine, Watcher]:
    clock = Clock()
    for module in (timer, batches_module, hook_order, requests):
        monkeypatch.setattr(module, "perf_counter", clock)
    task = SlowTask(nn.Linear(2, 1), nn.MSELoss())
    task.clock, task.slow = clock, slow or {}
    watcher = Watcher(clock, save=save)

    def pass_time(engine: Engine) -> None:
        clock.now += 2

    def move(batch: Any) -> Any:
        clock.now += copying
        return batch

    hooks: dict[str, Hook] = {"timer": IterTimerHook(), "watcher": watcher}
    if busy is not None:
        hooks["busy"] = at(busy[0], pass_time, nth=0, priority=busy[1])
    engine = engine_of(
        tmp_path,
        hooks,
        task=task,
        loaders=Loaders(SlowBatches(clock), SlowBatches(clock)),
        max_epochs=2,
        **settings,
    )
    monkeypatch.setattr(engine.batches, "_move", move)
    engine.train()
    return engine, watcher


@pytest.mark.parametrize("val_interval", [1, None])
def test_time_and_data_time_of_each_iteration(
    val_interval: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, watcher = _run(tmp_path, monkeypatch, val_interval=val_interval)
    assert watcher.means == [{"data_time": 3.0, "time": 4.0}] * 8


def test_data_time_is_the_loader_and_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, watcher = _run(tmp_path, monkeypatch, copying=1.0)
    assert watcher.means == [{"data_time": 4.0, "time": 5.0}] * 8


@pytest.mark.parametrize("priority", [20, 80], ids=["before", "after"])
@pytest.mark.parametrize("point", ["before_train_iter", "after_backward"])
def test_hooks_count_as_time_and_not_as_data_time(
    point: str, priority: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, watcher = _run(tmp_path, monkeypatch, busy=(point, priority))
    assert watcher.means == [{"data_time": 3.0, "time": 6.0}] * 8


def test_validation_and_checkpoints_are_not_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, watcher = _run(tmp_path, monkeypatch, save=True, val_by_epoch=False, val_interval=3)
    # There is a checkpoint after iteration 2, and validations after 3 and 6; 4 ends an epoch.
    assert watcher.means == [{"data_time": 3.0, "time": 4.0}] * 8
    assert engine.messages.read("timing").total == 8 * 4.0


def _eta(done: int, iterations: int) -> float:
    """Of iterations of 4 s, and 500 s between two epochs of 4 iterations."""
    return (iterations - done) * (4.0 + 500.0 * ((done - 1) // 4) / done)


def test_eta_counts_the_iterations_left_and_what_was_between_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, watcher = _run(tmp_path / "trained", monkeypatch, val_interval=None)
    assert watcher.etas == [_eta(done, 8) for done in range(1, 9)]
    _, validated = _run(tmp_path / "validated", monkeypatch)
    assert validated.etas[:4] == watcher.etas[:4]
    assert validated.etas[4] >= watcher.etas[4] + 3 * 100.0 / 5, "a validation batch takes 100 s"


@pytest.mark.parametrize("slow", [{1: 600.0}, {1: 600.0, 2: 200.0}], ids=["compilation", "compilation twice"])
def test_eta_soon_forgets_slow_first_iterations(
    slow: dict[int, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, watcher = _run(tmp_path, monkeypatch, slow=slow, max_iters=40, val_interval=None)
    latest = watcher.etas[2 * len(slow) - 1 :]
    assert latest == [pytest.approx(_eta(done, 40)) for done in range(2 * len(slow), 41)]


def test_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = _run(tmp_path, monkeypatch)
    hook = engine.hooks["timer"]
    assert isinstance(hook, IterTimerHook)
    summary = hook.summary()
    assert summary is not None
    assert summary == engine.messages.read("timing")
    assert (summary.iterations, summary.total, summary.mean, summary.max) == (8, 32.0, 4.0, 4.0)
    assert summary.data_share == 0.75
    assert (summary.p50, summary.p90) == (4.0, 4.0)
