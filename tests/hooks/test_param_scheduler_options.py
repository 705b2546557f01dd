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
from hydraloop.hooks.checkpoint.hook import CheckpointHook
from hydraloop.hooks.param_scheduler import ParamSchedulerHook
from hydraloop.optim import Plateau, Schedule
from hydraloop.schemas.scheduler import OPTIONS
from tests.config.composed import REPOSITORY
from tests.hooks.tiny_runs import BATCHES, Scripted, Stopper, engine_of, model
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


def optimizer_of(net: Any, kind: str) -> optim.Optimizer:
    parameters = net.parameters()
    return optim.SGD(parameters, lr=1e-2, momentum=0.9) if kind == "sgd" else optim.AdamW(parameters, lr=1e-2)


def train(
    run_dir: Path,
    options: Sequence[tuple[str, Mapping[str, Any]]],
    *,
    key: str = "lr",
    kind: str = "sgd",
    steps_per_epoch: int = BATCHES,
    stop_at: int = 0,
    **settings: Any,
) -> list[Any]:
    """The values of `key` in the iterations of a run of six epochs of four batches."""
    net = model()
    optimizer = optimizer_of(net, kind)
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


def yolox(n: int) -> float:
    # MMDetection's YOLOXLrUpdaterHook with a warm-up of one epoch (4 steps) and two last ones (8).
    if n < 4:
        return ((n + 1) / 4) ** 2
    if n + 1 >= STEPS - 8:
        return 0.05
    return 0.05 + 0.95 * (1 + math.cos(math.pi * (n + 1 - 4) / (STEPS - 4 - 8))) / 2


def test_yolox_in_a_run_has_mmdetections_values(tmp_path: Path) -> None:
    used = train(tmp_path, [("yolox", {"warmup_iters": 1, "num_last_epochs": 2})])
    assert used == pytest.approx([1e-2 * yolox(n) for n in range(STEPS)])


def test_a_converted_schedule_counts_optimizer_steps(tmp_path: Path) -> None:
    """Windows of two: two steps an epoch, the milestone of epoch 1 after two of them, that is four iterations."""
    changes = {"milestones": [1, 3], "convert_to_iter_based": True}
    used = train(tmp_path, [("multistep", changes)], steps_per_epoch=2, accumulate=2)
    assert used == pytest.approx([1e-2] * 4 + [1e-3] * 8 + [1e-4] * 12)
    converted = {"by_epoch": True, "convert_to_iter_based": True}
    used = train(tmp_path, [("cosine", converted)], steps_per_epoch=2, accumulate=2)
    assert used == pytest.approx([1e-2 * (1 + math.cos(math.pi * (n // 2) / 12)) / 2 for n in range(STEPS)])


@pytest.mark.parametrize("kind", ["sgd", "adamw"])
def test_the_momentum_is_warmed_up_beside_the_lr(tmp_path: Path, kind: str) -> None:
    options = [("cosine", {}), ("momentum", {"end": 8})]
    expected = [0.9 * (0.85 + 0.15 * min(n, 7) / 7) for n in range(STEPS)]
    used = train(tmp_path, options, key="momentum" if kind == "sgd" else "betas", kind=kind)
    assert [value if kind == "sgd" else value[0] for value in used] == pytest.approx(expected)
    lrs = train(tmp_path, options, kind=kind)
    assert lrs == pytest.approx([1e-2 * (1 + math.cos(math.pi * n / STEPS)) / 2 for n in range(STEPS)])


def test_weight_decay_follows_its_own_schedule(tmp_path: Path) -> None:
    used = train(tmp_path, [("poly", {"param": "weight_decay"})], key="weight_decay", kind="adamw")
    assert used == pytest.approx([0.01 * (1 - n / (STEPS - 1)) ** 0.9 for n in range(STEPS)])


def test_plateau_lowers_another_key_too(tmp_path: Path) -> None:
    net = model()
    optimizer = optimizer_of(net, "sgd")
    used = Used("momentum")
    plateau = Plateau(mode="max", patience=0, factor=0.5)
    schedules = {"plateau": Schedule("plateau", plateau, optimizer, param="momentum", by_epoch=True, monitor="acc")}
    hooks = {"used": used, "param_scheduler": ParamSchedulerHook()}
    metrics = {"acc": Scripted([0.5, 0.4, 0.6])}
    engine_of(tmp_path, hooks, net=net, optimizer=optimizer, schedules=schedules, metrics=metrics).train()
    assert used.values == [0.9] * 8 + [0.45] * 4


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


def test_a_plateau_on_the_accuracy_needs_no_mode(tmp_path: Path) -> None:
    engine = composed(
        "scheduler=plateau", "scheduler.plateau.monitor=accuracy", "engine.max_epochs=1", run_dir=tmp_path
    )
    engine.validate()
    schedules: Any = engine.run.schedules
    assert schedules["plateau"].function.mode == "max"


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


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ("scheduler.yolox.num_last_epochs=20", "scheduler.yolox.num_last_epochs"),
        ("scheduler.yolox.param=alpha", "scheduler.yolox.param"),
        ("scheduler.yolox.begin=-1", "scheduler.yolox.begin"),
        ("+scheduler.mine={_target_:hydraloop.optim.MultiStep,milestones:[0]}", "scheduler.mine.milestones"),
    ],
)
def test_a_mistake_in_the_config_is_one_message(tmp_path: Path, line: str, key: str) -> None:
    with pytest.raises(UserError) as caught:
        composed("scheduler=[yolox]", line, run_dir=tmp_path)
    assert caught.value.key == key
    assert caught.value.remedy
