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
from tests.helpers import at
from tests.hooks.tiny_runs import engine_of
from tests.ranks import on_ranks


class Norms(Hook):
    """The recorded norm of each step."""

    priority = 90

    def __init__(self) -> None:
        self.norms: list[float] = []

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: object, outputs: object) -> None:
        self.norms.append(engine.messages.means()["grad_norm"])


def train(distributed: Distributed, run_dir: str, options: dict[str, float]) -> tuple[list[float], dict[str, Tensor]]:
    """Three steps on the same batches everywhere: the norms, and the weights they lead to."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 1))
    distributed.prepare(model)
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(3)]
    hooks: dict[str, Hook] = {"clip": GradClipHook(**options), "norms": (norms := Norms())}
    task = Regression(model, nn.MSELoss())
    loaders = Loaders(batches)
    engine_of(Path(run_dir), hooks, task=task, loaders=loaders, max_epochs=1, distributed=distributed).train()
    return norms.norms, {name: whole(value).detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("options", [{"max_norm": 0.01}, {"clip_value": 0.01}])
def test_a_rank_without_a_part_clips_as_one_process_does(options: dict[str, float], tmp_path: Path) -> None:
    norms, weights = train(Distributed(), str(tmp_path), options)
    assert min(norms) > 0.01
    for norms_in_shards, weights_in_shards in on_ranks(2, train, str(tmp_path), options, strategy="fsdp2"):
        assert norms_in_shards == pytest.approx(norms)
        for name, value in weights.items():
            torch.testing.assert_close(weights_in_shards[name], value)


def skip_one(distributed: Distributed, run_dir: str) -> tuple[int, int, list[list[float]]]:
    """The loss of the second step is NaN on the last rank. Sums of weights and momentum after each of three steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1))
    distributed.prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(3)]
    if distributed.rank == distributed.world_size - 1:
        batches[1][1][0] = math.nan
    seen: list[list[float]] = []

    def see(engine: Engine) -> None:
        state = [whole(entry["momentum_buffer"]) for entry in optimizer.state.values()]
        seen.append([tensor.double().abs().sum().item() for tensor in (*map(whole, model.parameters()), *state)])

    hooks: dict[str, Hook] = {"clip": GradClipHook(skip_nonfinite=True), "see": at("after_train_iter", see, nth=0)}
    task = Regression(model, nn.MSELoss())
    options: dict[str, Any] = {"max_epochs": 1, "distributed": distributed, "optimizer": optimizer, "val": False}
    engine = engine_of(Path(run_dir), hooks, task=task, loaders=Loaders(batches), **options)
    assert engine.train().status == "finished"
    return engine.progress.optimizer_step, engine.run.precision.skipped, seen


@pytest.mark.parametrize("strategy", [None, "ddp", "fsdp2"])
def test_all_ranks_skip_a_step_which_leaves_weights_and_momentum(strategy: str | None, tmp_path: Path) -> None:
    if strategy is None:
        told = [skip_one(Distributed(), str(tmp_path))]
    else:
        told = on_ranks(2, skip_one, str(tmp_path), strategy=strategy)
    assert all(one == told[0] for one in told)
    steps, skipped, (before, after, end) = told[0]
    assert (steps, skipped) == (2, 1)
    assert before == after
    assert end != after
