"""RuntimeInfoHook: the facts of a real run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run_parts import Settings
from hydraloop.hooks.runtime_info import RuntimeInfoHook
from hydraloop.tasks.task import Task
from tests.helpers import EngineWithNeededHooks

NewOptimizer = Callable[..., torch.optim.Optimizer]


class Reader(Hook):
    """Keeps the facts of each iteration."""

    def __init__(self) -> None:
        self.facts: list[dict[str, Any]] = []
        self.kept: list[Any] = []

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        self.facts.append(engine.messages.facts())
        self.kept.append(outputs)


class TwoLosses(Task):
    """Returns a scalar, values of samples, and three losses."""

    def forward(self, batch: Any) -> dict[str, Any]:
        outputs = super().forward(batch)
        loss = outputs["loss"]
        per_sample = torch.ones(4)
        return {**outputs, "aux_loss": (2 * loss).reshape(1), "loss_weight": 0.5, "losses": per_sample, "score": loss}


def _engine(tmp_path: Path, optimizer: NewOptimizer | None = torch.optim.SGD, **options: Any) -> Engine:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    batches: list[tuple[Tensor, Tensor]] = [(torch.randn(4, 2), torch.randn(4, 1)) for _ in range(3)]
    return EngineWithNeededHooks(
        task=TwoLosses(model, nn.MSELoss()),
        optimizer=None if optimizer is None else optimizer(model.parameters(), lr=0.25, **options),
        loaders=Loaders(batches, batches[:1]),
        hooks={"runtime_info": RuntimeInfoHook(), "reader": Reader()},
        settings=Settings(max_epochs=2, device="cpu"),
        run_dir=tmp_path,
    )


def test_facts_follow_the_run(tmp_path: Path) -> None:
    engine = _engine(tmp_path)
    engine.train()
    facts = engine.hooks["reader"].facts  # type: ignore[attr-defined]
    assert [(fact["epoch"], fact["iter"]) for fact in facts] == [(0, 1), (0, 2), (0, 3), (1, 4), (1, 5), (1, 6)]
    assert {(fact["max_epochs"], fact["max_iters"], fact["lr"]) for fact in facts} == {(2, 6, 0.25)}
    assert facts[0]["metrics"] == {}
    assert engine.messages.read("metrics") == engine.metrics != {}


def test_the_losses_are_those_of_the_iteration_just_done(tmp_path: Path) -> None:
    engine = _engine(tmp_path)
    engine.train()
    reader = engine.hooks["reader"]
    for facts, outputs in zip(reader.facts, reader.kept, strict=True):  # type: ignore[attr-defined]
        losses = {name: float(value) for name, value in facts["losses"].items()}
        loss = outputs["loss"]
        assert losses == {"loss": loss, "aux_loss": 2 * loss, "loss_weight": 0.5, "score": loss}
    assert not any(torch.is_tensor(value) and value.requires_grad for value in engine.messages.read("losses").values())


def test_lr_is_read_when_asked(tmp_path: Path) -> None:
    engine = _engine(tmp_path)
    engine.train()
    engine.optimizer.param_groups[0]["lr"] = 0.125
    assert engine.messages.read("lr") == 0.125


@pytest.mark.parametrize(
    ("optimizer", "options", "momentum"),
    [
        (torch.optim.SGD, {"momentum": 0.75}, 0.75),
        (torch.optim.AdamW, {"betas": (0.5, 0.99)}, 0.5),
        (torch.optim.Adagrad, {}, None),
    ],
)
def test_momentum_of_any_optimizer(
    tmp_path: Path, optimizer: NewOptimizer, options: dict[str, Any], momentum: float | None
) -> None:
    engine = _engine(tmp_path, optimizer, **options)
    engine.train()
    assert engine.messages.read("momentum") == momentum


def test_evaluation_needs_no_optimizer(tmp_path: Path) -> None:
    engine = _engine(tmp_path, optimizer=None)
    engine.validate()
    assert engine.messages.read("lr") is None
    assert engine.messages.facts()["iter"] == 0
