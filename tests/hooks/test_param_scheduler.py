"""ParamSchedulerHook on real runs."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import optim
from torch.optim.lr_scheduler import LambdaLR

import hydraloop
from hydraloop import build
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from hydraloop.hooks.checkpoint import CheckpointHook
from hydraloop.hooks.param_scheduler import ParamSchedulerHook
from hydraloop.optim import Exponential, Function, Linear, MultiStep, Plateau, Schedule, TorchSchedule
from hydraloop.schemas.scheduler import OPTIONS
from tests.config.composed import REPOSITORY
from tests.helpers import summary
from tests.hooks.tiny_runs import BATCHES, Scripted, Stopper, engine_of, load, model
from tests.optim.scheduled import option


class LRs(Hook):
    """The lr of each iteration and of each epoch's start; called where the logger is, before the schedules."""

    priority = 60

    def __init__(self, *, record: bool = False) -> None:
        self.used: list[float] = []
        self.epochs: list[float] = []
        self._record = record

    def before_train_epoch(self, engine: Engine) -> None:
        self.epochs.append(engine.optimizer.param_groups[0]["lr"])

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        self.used.append(engine.optimizer.param_groups[0]["lr"])
        if self._record:
            engine.log_record({})


def run(
    run_dir: Path, factory: Any, *, optimizer: optim.Optimizer | None = None, schedule: Any = None, **settings: Any
) -> LRs:
    """Train with one schedule, `half` each step unless told otherwise; lr 1 at first."""
    net = model()
    optimizer = optim.SGD(net.parameters(), lr=1.0)
    lrs = LRs()
    schedules = {"only": Schedule("only", factory, optimizer, **(schedule or {}))}
    hooks = {"lrs": lrs, "param_scheduler": ParamSchedulerHook()}
    engine_of(run_dir, hooks, net=net, optimizer=optimizer, schedules=schedules, **settings).train()
    return lrs


HALF = Exponential(0.5)


def test_a_schedule_steps_after_each_optimizer_step(tmp_path: Path) -> None:
    assert run(tmp_path, HALF, max_iters=4).used == [1, 0.5, 0.25, 0.125]


def test_an_iteration_inside_a_window_is_no_step(tmp_path: Path) -> None:
    # Windows of 3 in epochs of 4: steps in the iterations 3 and 4 of each.
    assert run(tmp_path, HALF, max_epochs=2, accumulate=3).used == [1, 1, 1, 0.5, *[0.25] * 3, 0.125]


def test_a_schedule_by_epoch_steps_once_an_epoch(tmp_path: Path) -> None:
    lrs = run(tmp_path, HALF, schedule={"by_epoch": True})
    assert lrs.epochs == [1, 0.5, 0.25]
    assert lrs.used == [1] * 4 + [0.5] * 4 + [0.25] * 4


def test_a_skipped_step_moves_no_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    net = model()
    optimizer, lrs = optim.SGD(net.parameters(), lr=1.0), LRs()
    schedules = {"only": Schedule("only", HALF, optimizer)}
    hooks = {"lrs": lrs, "param_scheduler": ParamSchedulerHook()}
    engine = engine_of(tmp_path, hooks, net=net, optimizer=optimizer, schedules=schedules, max_epochs=1)
    taken, step = iter([True, False, True, True]), engine.run.precision.step
    monkeypatch.setattr(engine.run.precision, "step", lambda optimizer: next(taken) and step(optimizer))
    engine.train()
    assert lrs.used == [1, 0.5, 0.5, 0.25]


def test_any_key_of_any_number_of_schedules_is_stepped(tmp_path: Path) -> None:
    net = model()
    optimizer = optim.SGD(net.parameters(), lr=1.0, momentum=0.8)
    schedules = {
        "lr": Schedule("lr", HALF, optimizer, by_epoch=True),
        "momentum": Schedule("momentum", HALF, optimizer, param="momentum"),
    }
    hooks = {"param_scheduler": ParamSchedulerHook()}
    engine_of(tmp_path, hooks, net=net, optimizer=optimizer, schedules=schedules, max_epochs=1).train()
    assert optimizer.param_groups[0]["lr"] == 0.5
    assert optimizer.param_groups[0]["momentum"] == 0.8 / 2**4


@pytest.mark.parametrize("by_epoch", [False, True])
def test_a_scheduler_of_torch_is_stepped(tmp_path: Path, by_epoch: bool) -> None:
    net = model()
    optimizer, lrs = optim.SGD(net.parameters(), lr=1.0), LRs()
    factory = functools.partial(LambdaLR, lr_lambda=lambda n: 0.5**n)
    hooks = {"lrs": lrs, "param_scheduler": ParamSchedulerHook()}
    schedules = {"only": TorchSchedule("only", factory, optimizer, by_epoch=by_epoch)}
    engine_of(tmp_path, hooks, net=net, optimizer=optimizer, schedules=schedules, max_epochs=2).train()
    assert lrs.used == ([1] * 4 + [0.5] * 4 if by_epoch else [0.5**n for n in range(8)])


def test_what_a_hook_changes_stays_until_the_value_changes(tmp_path: Path) -> None:
    class Change(Hook):
        def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
            if engine.progress.iteration == 1:
                engine.optimizer.param_groups[0]["lr"] = 7.0

    net = model()
    optimizer, lrs = optim.SGD(net.parameters(), lr=1.0), LRs()
    schedules = {"only": Schedule("only", MultiStep([3], gamma=0.5), optimizer, begin=1)}
    hooks = {"lrs": lrs, "param_scheduler": ParamSchedulerHook(), "change": Change()}
    engine_of(tmp_path, hooks, net=net, optimizer=optimizer, schedules=schedules, max_iters=6).train()
    assert lrs.used == [1, 7, 7, 7, 0.5, 0.5]


def test_nor_does_a_validation_after_the_training(tmp_path: Path) -> None:
    net = model()
    optimizer = optim.SGD(net.parameters(), lr=1.0)
    plateau = Plateau(mode="max", patience=0, factor=0.5)
    schedules = {"plateau": Schedule("plateau", plateau, optimizer, monitor="acc")}
    hooks = {"param_scheduler": ParamSchedulerHook()}
    metrics = {"acc": Scripted([0.5, 0.4, 0.3])}
    settings: dict[str, Any] = {"metrics": metrics, "max_epochs": 1}
    engine = engine_of(tmp_path, hooks, net=net, optimizer=optimizer, schedules=schedules, **settings)
    engine.train()
    for _ in range(2):
        engine.validate()
    assert optimizer.param_groups[0]["lr"] == 1.0


@pytest.mark.parametrize(("higher", "rates"), [(True, [1, 1, 1, 0.5]), (False, [1, 1, 0.5, 0.25])])
def test_without_a_mode_a_plateau_follows_the_metric_in_its_own_direction(
    tmp_path: Path, higher: bool, rates: list[float]
) -> None:
    plateau = Plateau(patience=0, factor=0.5)
    metrics = {"score": Scripted([0.5, 0.6, 0.6, 0.7], higher_is_better=higher)}
    lrs = run(tmp_path, plateau, schedule={"monitor": "score", "by_epoch": True}, metrics=metrics, max_epochs=4)
    assert lrs.epochs == rates


def test_a_metric_without_a_direction_is_an_error_before_the_first_iteration(tmp_path: Path) -> None:
    plateau = Plateau(patience=0)
    with pytest.raises(UserError, match=r"^scheduler\.only\.mode: it is not known whether .* 'score' are good"):
        run(tmp_path, plateau, schedule={"monitor": "score"}, metrics={"score": Scripted([0.5])})


def test_a_mode_against_the_metric_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plateau = Plateau(mode="min")
    metrics = {"score": Scripted([0.5, 0.6, 0.7], higher_is_better=True)}
    run(tmp_path, plateau, schedule={"monitor": "score", "by_epoch": True}, metrics=metrics)
    assert caplog.text.count("scheduler.only.mode=min, but high values of score are good") == 1


def test_an_unknown_monitor_is_an_error_before_the_first_iteration(tmp_path: Path) -> None:
    plateau = Plateau(mode="max")
    with pytest.raises(UserError, match=r"scheduler\.only\.monitor: there is no metric 'los'\n  Did you mean loss"):
        run(tmp_path, plateau, schedule={"monitor": "los"})


def test_a_resumed_run_continues_with_its_lr(tmp_path: Path) -> None:
    def hooks(lrs: LRs, stop_at: int) -> dict[str, Hook]:
        stopper, checkpoint = Stopper(stop_at=stop_at), CheckpointHook()
        return {"lrs": lrs, "param_scheduler": ParamSchedulerHook(), "stopper": stopper, "checkpoint": checkpoint}

    def train(lrs: LRs, stop_at: int, **settings: Any) -> None:
        net = model()
        optimizer = optim.SGD(net.parameters(), lr=1.0)
        factory = Linear(0.1, total_iters=10)
        schedules = {"warm_up": Schedule("warm_up", factory, optimizer)}
        engine_of(tmp_path, hooks(lrs, stop_at), net=net, optimizer=optimizer, schedules=schedules, **settings).train()

    whole, first, second = LRs(), LRs(), LRs()
    train(whole, 0)
    train(first, 6)
    saved = tmp_path / "checkpoints" / "iter_6.pth"
    assert load(saved)["schedulers"].keys() == {"warm_up"}
    train(second, 0, resume=saved)
    assert first.used + second.used == whole.used


@pytest.mark.parametrize("tensor", [False, True])
def test_the_lr_is_summarised_after_training(tmp_path: Path, tensor: bool) -> None:
    # Rises until the sixth of twelve iterations, where only a record reads it, then falls.
    net = model()
    lr = torch.tensor(1.0) if tensor else 1.0
    optimizer = optim.SGD(net.parameters(), lr=lr)

    class Triangle(Function):
        def value(self, k: int, length: int, value: float, initial: float) -> float:
            return value * (0.1 * min(k, 12 - k) + 0.1)

    schedules = {"triangle": Schedule("triangle", Triangle(), optimizer)}
    hooks = {"lrs": LRs(record=True), "param_scheduler": ParamSchedulerHook()}
    engine = engine_of(tmp_path, hooks, net=net, optimizer=optimizer, schedules=schedules)
    engine.train()
    assert "\nlr          0.1 at iteration 0, 0.1 at iteration 12\n" in summary(engine)


# The options of `scheduler` in real runs: the values that each iteration used. ----------------------------------------


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
        "scheduler=[yolox,momentum]", "scheduler.yolox.warmup=2", "scheduler.yolox.num_last_epochs=1",
        "scheduler.momentum.end=null", "engine.accumulate=2", "engine.max_epochs=5",
        run_dir=tmp_path,
    )  # fmt: skip
    schedules: Any = engine.run.schedules
    yolox = schedules["yolox"].function
    assert (schedules["yolox"].end, yolox.warmup, yolox.num_last_epochs) == (50, 20, 10)
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
