"""Real runs that take milliseconds, for the tests of the training hooks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn, optim

from hydraloop.engine.checkpoint.format import load as load
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, OnError
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.precision import Precision
from hydraloop.engine.run_parts import Settings
from hydraloop.tasks.task import Task
from tests.helpers import EngineWithNeededHooks

BATCHES = 4
"""In an epoch."""


class Scripted:
    """A metric with given values, one for each evaluation."""

    def __init__(self, values: Iterable[float], higher_is_better: bool | None = None) -> None:
        self.values = iter(values)
        self.higher_is_better = higher_is_better

    def update(self, preds: Tensor, target: Tensor) -> None:
        """Ignore a batch."""

    def compute(self) -> Tensor:
        return torch.tensor(next(self.values), dtype=torch.float64)

    def reset(self) -> None:
        """Nothing to forget."""

    def to(self, device: torch.device) -> Scripted:
        return self


class Stopper(Hook):
    """Stops or fails after an iteration."""

    def __init__(self, *, stop_at: int = 0, fail_at: int = 0) -> None:
        self.stop_at, self.fail_at = stop_at, fail_at

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        if engine.progress.iteration == self.stop_at:
            engine.request_stop("told to")
        if engine.progress.iteration == self.fail_at:
            raise FloatingPointError("told to")


def batches(count: int = BATCHES, *, seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(4, 3, generator=generator), torch.randn(4, 2, generator=generator)) for _ in range(count)]


def model() -> nn.Sequential:
    """Three layers, one with buffers; always the same initial weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))


def engine_of(
    run_dir: Path,
    hooks: Mapping[str, Hook | None],
    *,
    task: Task | None = None,
    loaders: Loaders | None = None,
    metrics: Mapping[str, Any] | None = None,
    net: nn.Module | None = None,
    train: Sequence[Any] | None = None,
    test: bool = False,
    val: bool = True,
    schedules: Mapping[str, Any] | None = None,
    optimizer: optim.Optimizer | None = None,
    distributed: Distributed | None = None,
    precision: Precision | None = None,
    seed: int = 0,
    on_error: Mapping[str, OnError] | None = None,
    **settings: Any,
) -> Engine:
    """An engine over four batches an epoch, or the `loaders`, with SGD; `settings` are the engine's.

    There is no sanity step, because a `Scripted` metric has one value for each evaluation.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    task = task or Task(model() if net is None else net, nn.functional.mse_loss, metrics)
    return EngineWithNeededHooks(
        task=task,
        optimizer=optim.SGD(task.parameters(), lr=0.1, momentum=0.9) if optimizer is None else optimizer,
        loaders=loaders
        or Loaders(
            train=batches() if train is None else train,
            val=batches(2, seed=1) if val else None,
            test=batches(2, seed=2) if test else None,
        ),
        hooks=hooks,
        schedules=schedules,
        settings=Settings(**{"max_epochs": 3, "device": "cpu", "sanity_val_steps": 0, **settings}),
        run_dir=run_dir,
        distributed=distributed,
        precision=precision,
        seed=seed,
        on_error=on_error,
    )


def bits(net: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.state_dict().items()}


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Equal to the last bit."""
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
