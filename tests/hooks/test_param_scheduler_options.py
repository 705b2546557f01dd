"""The options of `scheduler` in real runs: the values that each iteration used."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from torch import optim

import hydraloop
from hydraloop import build
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from hydraloop.hooks.checkpoint import CheckpointHook
from hydraloop.hooks.param_scheduler import ParamSchedulerHook
from hydraloop.schemas.scheduler import OPTIONS
from tests.config.composed import REPOSITORY
from tests.hooks.tiny_runs import BATCHES, Stopper, engine_of, model
from tests.optim.scheduled import option

EPOCHS = 6
STEPS = EPOCHS * BATCHES


class Used(Hook):
    """The value of a key of the first group in each iteration."""

    priority = 60

    def __init__(self, key: str = "lr") -> None:
        self.key = key
        self.values: list[Any] = []

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        self.values.append(engine.optimizer.param_groups[0][self.key])


def train(
    run_dir: Path,
    options: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    key: str = "lr",
    steps_per_epoch: int = BATCHES,
    stop_at: int = 0,
    **settings: Any,
) -> list[Any]:
    """The values of `key` in the iterations of a run of six epochs of four batches."""
    net = model()
    optimizer = optim.SGD(net.parameters(), lr=1e-2, momentum=0.9)
    used = Used(key)
    schedules = {
        name: option(name, optimizer, epochs=EPOCHS, steps_per_epoch=steps_per_epoch, **changes)
        for name, changes in options
    }
    hooks = {
        "used": used,
        "param_scheduler": ParamSchedulerHook(),
        "stopper": Stopper(stop_at=stop_at),
        "checkpoint": CheckpointHook(),
    }
    settings = {"max_epochs": EPOCHS, **settings}
    engine_of(run_dir, hooks, net=net, optimizer=optimizer, schedules=schedules, **settings).train()
    return used.values


def test_a_converted_schedule_counts_optimizer_steps(tmp_path: Path) -> None:
    """Windows of two: two steps an epoch, the milestone of epoch 1 after two of them, that is four iterations."""
    changes = {"milestones": [1, 3], "convert_to_iter_based": True}
    used = train(tmp_path, [("multistep", changes)], steps_per_epoch=2, accumulate=2)
    assert used == pytest.approx([1e-2] * 4 + [1e-3] * 8 + [1e-4] * 12)
    converted = {"by_epoch": True, "convert_to_iter_based": True}
    used = train(tmp_path, [("cosine", converted)], steps_per_epoch=2, accumulate=2)
    assert used == pytest.approx([1e-2 * (1 + math.cos(math.pi * (n // 2) / 12)) / 2 for n in range(STEPS)])


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_every_option_resumes_to_the_last_bit(tmp_path: Path, name: str) -> None:
    changes: dict[str, dict[str, Any]] = {
        **{option: {"end": 20} for option in ("constant", "linear", "momentum")},
        "multistep": {"milestones": [1, 3]},
    }
    options = [(name, changes.get(name, {}))]
    key = "momentum" if name == "momentum" else "lr"
    whole = train(tmp_path / "whole", options, key=key)
    first = train(tmp_path / "cut", options, key=key, stop_at=10)
    saved = tmp_path / "cut" / "checkpoints" / "iter_10.pth"
    assert first + train(tmp_path / "cut", options, key=key, resume=saved) == whole
    assert len(first) == 10
    assert len(set(whole)) > 1 or name == "plateau"


def test_a_plateau_without_a_validation_is_an_error_before_the_first_iteration(tmp_path: Path) -> None:
    for settings in ({"val": False}, {"val_interval": None}):
        with pytest.raises(UserError, match="this needs a validation, and the run has none") as caught:
            train(tmp_path, [("plateau", {})], **settings)
        assert caught.value.key == "scheduler.plateau.monitor"


def composed(*lines: str, **changes: Any) -> Engine:
    run_dir = changes.pop("run_dir")
    cfg = hydraloop.compose(["engine.device=cpu", "default_hooks=[param_scheduler]", *lines], folder=REPOSITORY)
    return build(cfg, run_dir=run_dir)


def test_the_config_reaches_the_schedules(tmp_path: Path) -> None:
    """20 batches an epoch: 10 optimizer steps with accumulate 2."""
    engine = composed(
        "scheduler=[yolox,momentum]", "scheduler.yolox.warmup_iters=2", "scheduler.yolox.num_last_epochs=1",
        "scheduler.momentum.end=null", "engine.accumulate=2", "engine.max_epochs=5",
        run_dir=tmp_path,
    )  # fmt: skip
    schedules: Any = engine.run.schedules
    yolox = schedules["yolox"].function
    assert (schedules["yolox"].end, yolox.warmup_iters, yolox.num_last_epochs) == (50, 20, 10)
    assert not schedules["yolox"].by_epoch
    assert (schedules["momentum"].begin, schedules["momentum"].end) == (0, 50)


def test_an_ad_hoc_schedule_takes_the_same_fields(tmp_path: Path) -> None:
    mine = "+scheduler.mine={_target_:hydraloop.optim.MultiStep,milestones:[2],param:weight_decay,"
    engine = composed(
        "scheduler=[cosine]",
        mine + "by_epoch:true,convert_to_iter_based:true}",
        "engine.max_epochs=1",
        run_dir=tmp_path,
    )
    schedules: Any = engine.run.schedules
    assert schedules["mine"].function.milestones == [40]
    assert list(schedules) == ["cosine", "mine"]
