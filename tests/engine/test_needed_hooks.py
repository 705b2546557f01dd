"""`Engine` adds the hooks without which it trains worse: `sampler_seed`, and with schedules `param_scheduler`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import hydraloop
from hydraloop.data import build_loader
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.errors import UserError
from hydraloop.hooks import DistSamplerSeedHook, ParamSchedulerHook
from hydraloop.optim import Exponential, Schedule
from tests.config.composed import REPOSITORY
from tests.helpers import differences
from tests.hooks.tiny_runs import batches, engine_of, model

DEFAULTS = ("sampler_seed", "param_scheduler")
SAME = "default_hooks.sampler_seed=null: all epochs have the same order of samples and augmentation"


class Noisy(torch.utils.data.Dataset[Any]):
    """Eight samples with their number and a random number of the loader."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(index), float(torch.rand(())), 0.0]), torch.zeros(2)


class Seen(Hook):
    """The batches and the learning rates of each epoch."""

    def __init__(self) -> None:
        self.epochs: list[list[Any]] = []

    def before_train_epoch(self, engine: Engine) -> None:
        self.epochs.append([])

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        self.epochs[-1].append([batch[0], engine.optimizer.param_groups[0]["lr"]])


def seen(run_dir: Path, hooks: dict[str, Hook | None], **options: Any) -> list[list[Any]]:
    watch, net = Seen(), model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    schedules = {"half": Schedule("half", Exponential(0.5), optimizer)} if options.get("scheduled", True) else {}
    train = build_loader(Noisy(), shuffle=True, batch_size=2)
    engine_of(
        run_dir, {**hooks, "watch": watch}, net=net, optimizer=optimizer, schedules=schedules, train=train
    ).train()
    return watch.epochs


def test_an_engine_without_hooks_trains_as_one_with_them(tmp_path: Path) -> None:
    """Each epoch has its own order and its own augmentation, and the schedule changes the learning rate."""
    found = seen(tmp_path / "without", {})
    expected = seen(tmp_path / "with", {"sampler_seed": DistSamplerSeedHook(), "param_scheduler": ParamSchedulerHook()})
    assert list(differences(found, expected)) == []
    assert len({str(epoch) for epoch in found}) == 3
    assert [lr for epoch in found for _, lr in epoch] == [0.1 * 0.5**step for step in range(12)]


def test_a_hook_can_be_left_out(tmp_path: Path) -> None:
    first, *others = seen(tmp_path, {"sampler_seed": None}, scheduled=False)
    assert all(not list(differences(first, other)) for other in others), "all epochs are the same"
    with pytest.raises(UserError, match="would not be applied") as caught:
        seen(tmp_path / "scheduled", {"param_scheduler": None})
    assert caught.value.key == "default_hooks.param_scheduler"
    assert "scheduler={}" in str(caught.value.remedy)


def test_a_hook_of_the_same_class_is_enough(tmp_path: Path) -> None:
    class Mine(ParamSchedulerHook):
        """A user's own, under another name."""

    engine = engine_of(tmp_path, {"mine": Mine()}, schedules={"half": Schedule("half", Exponential(0.5), optimizer())})
    assert list(engine.hooks) == ["mine", "sampler_seed"]


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD(model().parameters(), lr=0.1)


def test_they_are_default_hooks_and_cost_nothing_in_an_iteration(tmp_path: Path) -> None:
    engine = engine_of(tmp_path, {"mine": Seen()})
    assert [(slot.name, slot.priority, slot.is_default) for slot in engine.calls.slots] == [
        ("sampler_seed", 50, True),
        ("mine", 50, False),
    ]
    alone = engine_of(tmp_path, {})
    for point in ("before_train_iter", "after_backward", "before_optimizer_step", "after_train_iter"):
        assert alone.calls.one_by_one(point) == []


def test_an_engine_that_only_evaluates_needs_none(tmp_path: Path) -> None:
    assert Engine(task=engine_of(tmp_path, {}).task, loaders=Loaders(val=batches(1)), run_dir=tmp_path).hooks == {}


@pytest.mark.parametrize(
    ("line", "hooks", "said"),
    [
        (
            "default_hooks=[]",
            DEFAULTS,
            ["default_hooks is empty: this run writes no records (metrics.jsonl) and no checkpoints"],
        ),
        ("~default_hooks.sampler_seed", DEFAULTS, []),
        ("default_hooks.sampler_seed=null", DEFAULTS[1:], [SAME]),
        ("default_hooks=[] scheduler={} +default_hooks.sampler_seed=null", (), [SAME, "default_hooks is empty"]),
        (
            "default_hooks=[] +hooks.logger._target_=hydraloop.hooks.LoggerHook",
            DEFAULTS,
            ["this run writes no checkpoints"],
        ),
    ],
)
def test_a_config_says_what_is_missing(
    line: str, hooks: tuple[str, ...], said: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = hydraloop.build(hydraloop.compose(line.split(), folder=REPOSITORY), run_dir=tmp_path)
    assert [name for name in DEFAULTS if name in engine.hooks] == sorted(hooks, key=DEFAULTS.index)
    lines = [message for message in caplog.messages if "default_hooks" in message]
    assert len(lines) == len(said)
    assert all(part in line for part, line in zip(said, lines, strict=True))


def test_schedules_that_would_not_be_applied_are_refused_from_python(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="would not be applied"):
        hydraloop.build(hydraloop.compose(["default_hooks.param_scheduler=null"], folder=REPOSITORY), run_dir=tmp_path)
