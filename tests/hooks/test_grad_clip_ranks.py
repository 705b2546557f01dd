"""GradClipHook where the model is in shards, and some ranks have no part of a parameter."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import whole
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.hooks.grad_clip import GradClipHook
from hydraloop.tasks import Regression
from tests.hooks.tiny_runs import engine_of
from tests.ranks import RankError, on_ranks


class Poison(Hook):
    """Puts a value into the last gradient that only rank 0 has a part of."""

    def __init__(self, value: float) -> None:
        self._value = value

    def after_backward(self, engine: Engine, batch_idx: int, batch: object, outputs: object) -> None:
        gradient = list(engine.model.parameters())[-1].grad
        assert gradient is not None
        gradient.mul_(self._value)


class Norms(Hook):
    """The recorded norm of each step."""

    priority = 90

    def __init__(self) -> None:
        self.norms: list[float] = []

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: object, outputs: object) -> None:
        self.norms.append(engine.messages.means()["grad_norm"])


def train(
    distributed: Distributed,
    run_dir: str,
    options: dict[str, float | bool],
    poison: float | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps on the same batches everywhere: the norms, and the weights they lead to."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    distributed.prepare(model)
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(3)]
    hooks: dict[str, Hook] = {"clip": GradClipHook(**options), "norms": (norms := Norms())}
    if poison is not None:
        hooks["poison"] = Poison(poison)
    task = Regression(model, nn.MSELoss())
    options_of_run: dict[str, Any] = {"max_epochs": 1, "allow_nan": poison is not None, "distributed": distributed}
    engine_of(Path(run_dir), hooks, task=task, loaders=Loaders(batches), **options_of_run).train()
    return norms.norms, {name: whole(value).detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize(
    "options",
    [{"max_norm": 0.01, "norm_type": math.inf}, {"clip_value": 0.01, "norm_type": math.inf}, {"max_norm": 0.01}],
)
def test_a_rank_without_a_part_clips_as_one_process_does(options: dict[str, float], tmp_path: Path) -> None:
    norms, weights = train(Distributed(), str(tmp_path), options)
    assert min(norms) > 0.01
    for norms_in_shards, weights_in_shards in on_ranks(2, train, str(tmp_path), options, strategy="fsdp2"):
        assert norms_in_shards == pytest.approx(norms)
        for name, value in weights.items():
            torch.testing.assert_close(weights_in_shards[name], value)


def test_a_nan_on_one_rank_is_the_norm_of_all(tmp_path: Path) -> None:
    options = {"max_norm": 0.01, "norm_type": math.inf}
    for norms, weights in on_ranks(2, train, str(tmp_path), options, math.nan, strategy="fsdp2"):
        assert all(map(math.isnan, norms))
        assert all(value.isnan().all() for value in weights.values())


def test_an_infinite_largest_entry_can_end_the_run(tmp_path: Path) -> None:
    options = {"max_norm": 0.01, "norm_type": math.inf, "error_if_nonfinite": True}
    with pytest.raises(RankError, match="the largest entry of the gradients is not finite"):
        on_ranks(2, train, str(tmp_path), options, math.inf, strategy="fsdp2")
