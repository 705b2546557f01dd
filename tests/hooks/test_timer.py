"""IterTimerHook on real runs whose clock is a number: loading takes 3 s, a step 1 s, everything else far longer."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.parts import Loaders, Settings
from hydraloop.engine.timing import Durations
from hydraloop.hooks import timer
from hydraloop.hooks.timer import IterTimerHook
from hydraloop.tasks.task import Task


class Clock:
    """Seconds that pass when told."""

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
    """A second a training step, a hundred a validation batch."""

    clock: Clock

    def forward(self, batch: Any) -> dict[str, Any]:
        self.clock.now += 1
        return super().forward(batch)

    def evaluate(self, batch: Any) -> dict[str, Any]:
        self.clock.now += 100
        return super().evaluate(batch)


class Watcher(Hook):
    """Keeps what the timer says after each iteration; asks for a checkpoint that takes long after the second."""

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

    def _write(self, engine: Engine) -> None:
        engine.save_checkpoint(engine.run_dir / "slow.pth")
        self._clock.now += 1000


def _run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, save: bool = False, **settings: Any
) -> tuple[Engine, Watcher]:
    clock = Clock()
    monkeypatch.setattr(timer, "perf_counter", clock)
    model = nn.Linear(2, 1)
    task = SlowTask(model, nn.MSELoss())
    task.clock = clock
    watcher = Watcher(clock, save=save)
    engine = Engine(
        task=task,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loaders=Loaders(SlowBatches(clock), SlowBatches(clock)),
        hooks={"timer": IterTimerHook(), "watcher": watcher},
        settings=Settings(max_epochs=2, device="cpu", **settings),
        run_dir=tmp_path,
    )
    engine.train()
    return engine, watcher


def test_time_and_data_time_of_each_iteration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, watcher = _run(tmp_path, monkeypatch)
    assert watcher.means == [{"data_time": 3.0, "time": 4.0}] * 8


def test_validation_and_checkpoints_are_not_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, watcher = _run(tmp_path, monkeypatch, save=True, val_by_epoch=False, val_interval=3)
    # After the checkpoint at 2 and the validations at 3 and 6 only the step is timed; 4 ends an epoch.
    alone, whole = {"time": 1.0}, {"data_time": 3.0, "time": 4.0}
    assert watcher.means == [whole, whole, alone, alone, whole, whole, alone, whole]
    assert engine.messages.read("timing").total == 5 * 4.0 + 3 * 1.0


def test_eta_counts_the_iterations_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, watcher = _run(tmp_path, monkeypatch)
    assert watcher.etas == [4.0 * left for left in (7, 6, 5, 4, 3, 2, 1, 0)]


def test_summary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = _run(tmp_path, monkeypatch)
    hook = engine.hooks["timer"]
    assert isinstance(hook, IterTimerHook)
    summary = hook.summary()
    assert summary is not None
    assert summary == engine.messages.read("timing")
    assert (summary.iterations, summary.total, summary.mean, summary.max) == (8, 32.0, 4.0, 4.0)
    assert summary.data_share == 0.75
    assert summary.p50 == pytest.approx(4.0, rel=0.022)
    assert summary.p90 <= summary.max


def test_before_the_first_iteration_there_is_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = _run(tmp_path, monkeypatch)
    engine.hooks["timer"] = fresh = IterTimerHook()
    fresh.before_run(engine)
    assert engine.messages.read("eta") is None
    assert engine.messages.read("timing") is None


def test_quantiles_are_within_their_resolution() -> None:
    generator = random.Random(0)
    values = [math.exp(generator.uniform(math.log(1e-5), math.log(50.0))) for _ in range(5001)]
    durations = Durations()
    for value in values:
        durations.add(value)
    values.sort()
    for q in (0.01, 0.5, 0.9, 0.999):
        assert durations.quantile(q) == pytest.approx(values[math.ceil(q * 5001) - 1], rel=0.022)
    assert durations.quantile(1.0) <= durations.max == values[-1]


def test_memory_is_bounded_and_zero_is_a_duration() -> None:
    durations = Durations()
    durations.add(0.0)
    for exponent in range(-9, 6):
        for mantissa in range(10, 100):
            durations.add(mantissa / 10 * 10.0**exponent)
    assert durations.count == 1 + 15 * 90
    assert len(durations._buckets) < 800
    assert durations.quantile(0.0005) < 2e-9
