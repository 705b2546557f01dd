"""Several optimizers as one: the same numbers as one optimizer, and state by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from hydraloop.engine.engine import Engine
from hydraloop.engine.named_optimizers import OptimizerSet, describe, parts
from hydraloop.engine.precision import make_precision
from hydraloop.hooks import EMAHook, GradClipHook
from hydraloop.tasks import Task
from tests.helpers import batches, differences, make_engine


class _Overflows(nn.MSELoss):
    """Infinite in the third call."""

    calls = 0

    def forward(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        loss: torch.Tensor = super().forward(outputs, targets)
        return loss * torch.inf if self.calls == 3 else loss


def network() -> nn.Sequential:
    """The same each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1))


def two(model: nn.Sequential) -> OptimizerSet:
    """One optimizer for each layer."""
    return OptimizerSet(
        {name: optim.AdamW(model[index].parameters(), lr=0.05) for name, index in (("first", 0), ("last", 2))}
    )


def trained(run_dir: Path, *, several: bool, precision: str, accumulate: int) -> Engine:
    """Train for two epochs of 8 batches, with clipping and EMA, and one overflow in fp16."""
    task = Task(network(), _Overflows() if precision == "fp16" else nn.MSELoss())
    model: Any = task.model
    engine = make_engine(
        run_dir,
        {"clip": GradClipHook(max_norm=0.5), "ema": EMAHook()},
        train=batches(8, last=2),
        task=task,
        optimizer=two(model) if several else optim.AdamW(model.parameters(), lr=0.05),
        precision=make_precision({"name": precision}, torch.device("cpu")),
        max_epochs=2,
        accumulate=accumulate,
    )
    engine.train()
    return engine


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_two_optimizers_train_as_one_of_the_same_kind(precision: str, accumulate: int, tmp_path: Path) -> None:
    one, other = (trained(tmp_path, several=several, precision=precision, accumulate=accumulate) for several in (0, 1))
    assert list(differences(one.model.state_dict(), other.model.state_dict())) == []
    assert list(differences(one.hooks["ema"].state_dict(), other.hooks["ema"].state_dict())) == []
    assert one.progress == other.progress
    # The infinite loss, and with the first scale of 65536 maybe others: both optimizers skip the same steps.
    assert one.run.precision.skipped == other.run.precision.skipped
    assert (one.run.precision.skipped > 0) is (precision == "fp16")


def test_names_of_optimizers_and_groups() -> None:
    model = network()
    several = two(model)
    several.named["last"].add_param_group({"params": [nn.Parameter(torch.zeros(1))], "name": "other"})
    assert list(parts(several)) == ["first", "last"]
    assert [tuple(group) for group in describe(several, model)[:2]] == [
        ("first", "0", ("0.weight", "0.bias")),
        ("last", "0", ("2.weight", "2.bias")),
    ]
    assert describe(several, model)[2][:2] == ("last", "other")
    one = optim.SGD(model.parameters())
    assert parts(one) == {"": one}
    with pytest.raises(TypeError, match=r"engine\.run\.optimizers"):
        several.add_param_group({"params": []})
