"""EMAHook on two ranks: one average, the same on both, of the whole model or of each rank's shards."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import whole
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.hooks.checkpoint import CheckpointHook
from hydraloop.hooks.ema import EMAHook
from tests.hooks.test_ema import average, check
from tests.hooks.tiny_runs import batches, engine_of, load, model, same
from tests.ranks import on_ranks

Weights = dict[str, Tensor]


class Watcher(Hook):
    """Whole weights, on every rank: after each step, and in the last validation."""

    priority = 45

    def __init__(self) -> None:
        self.steps: list[Weights] = []
        self.evaluated: Weights = {}

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        if engine.stepper.stepped:
            self.steps.append(_whole(engine))

    def before_val_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        self.evaluated = _whole(engine)


def _whole(engine: Engine) -> Weights:
    return {name: whole(value).detach().clone() for name, value in engine.model.state_dict().items()}


def train(
    distributed: Distributed, run_dir: str, options: dict[str, Any], resume: str | None = None
) -> tuple[list[Weights], Weights, Weights, float]:
    """Weights after each step, evaluated ones, the averages, the last loss of a validation."""
    net = model()
    distributed.prepare(net)
    ema, watcher = EMAHook(momentum=0.3, warmup=False, **options), Watcher()
    hooks = {"watcher": watcher, "ema": ema, "checkpoint": CheckpointHook()}
    mine = batches(8)[distributed.rank :: 2]
    path = None if resume is None else Path(resume)
    engine = engine_of(
        Path(run_dir), hooks, net=net, train=mine, distributed=distributed, accumulate=3, max_epochs=3, resume=path
    )
    engine.train()
    averages = {name: whole(value).clone() for name, value in ema.state_dict()["averaged"].items()}
    return watcher.steps, watcher.evaluated, averages, engine.metrics["loss"]


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
@pytest.mark.parametrize("update_buffers", [False, True])
def test_two_ranks_have_one_average(tmp_path: Path, strategy: str, update_buffers: bool) -> None:
    ranks = on_ranks(2, train, str(tmp_path), {"update_buffers": update_buffers}, strategy=strategy)
    parameters = {name for name, _ in model().named_parameters()}
    for steps, evaluated, averages, _ in ranks:
        assert len(steps) == 6  # windows of 3 in epochs of 4
        check({name: averages[name] for name in parameters}, average(steps, lambda u: 0.3))
        assert same({name: evaluated[name] for name in parameters}, {name: averages[name] for name in parameters})
    assert same(ranks[0][1], ranks[1][1]), "what is evaluated is the same, buffers too"
    assert ranks[0][3] == ranks[1][3]
    saved = load(tmp_path / "checkpoints" / "epoch_3.pth")
    assert same(saved["hooks"]["ema"]["averaged"], ranks[0][2]), "whole, and rank 0's buffers"
    assert ("1.running_mean" in ranks[0][2]) == update_buffers
    assert same({n: saved["state_dict"][n] for n in parameters}, {n: ranks[0][0][-1][n] for n in parameters}), "raw"


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_two_ranks_resume_with_it(tmp_path: Path, strategy: str) -> None:
    options = {"update_buffers": True}
    whole_run = on_ranks(2, train, str(tmp_path / "whole"), options, strategy=strategy)
    resume = str(tmp_path / "whole" / "checkpoints" / "epoch_2.pth")
    resumed = on_ranks(2, train, str(tmp_path / "resumed"), options, resume, strategy=strategy)
    assert same(resumed[0][2], whole_run[0][2])
    for before, after in zip(whole_run, resumed, strict=True):
        assert same(before[1], after[1])
        assert before[3] == after[3]
