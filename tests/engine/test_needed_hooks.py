"""The hooks without which a run trains worse: `build` adds them, and `Engine` refuses to train without them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler

import hydraloop
from hydraloop.data import build_loader
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import UserError
from hydraloop.hooks import DistSamplerSeedHook, ParamSchedulerHook
from hydraloop.optim import Exponential, Schedule
from hydraloop.tasks.task import Task
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


def engine_by_hand(
    run_dir: Path, hooks: dict[str, Hook | None], *, scheduled: bool = True, train: Any = None
) -> Engine:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    return Engine(
        task=Task(net, torch.nn.functional.mse_loss),
        optimizer=optimizer,
        loaders=Loaders(build_loader(Noisy(), shuffle=True, batch_size=2) if train is None else train),
        hooks=hooks,
        schedules={"half": Schedule("half", Exponential(0.5), optimizer)} if scheduled else {},
        settings=Settings(device="cpu", max_epochs=3),
        run_dir=run_dir,
    )


def test_the_hooks_give_each_epoch_its_own_order_and_apply_the_schedule(tmp_path: Path) -> None:
    watch = Seen()
    hooks: dict[str, Hook | None] = {"sampler_seed": DistSamplerSeedHook(), "param_scheduler": ParamSchedulerHook()}
    engine_by_hand(tmp_path, {**hooks, "watch": watch}).train()
    assert len({str(epoch) for epoch in watch.epochs}) == 3
    assert [lr for epoch in watch.epochs for _, lr in epoch] == [0.1 * 0.5**step for step in range(12)]


def test_an_engine_without_them_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="all epochs would have the same order") as caught:
        engine_by_hand(tmp_path, {}, scheduled=False)
    assert caught.value.key == "hooks.sampler_seed"
    for hooks in ({}, {"param_scheduler": None}):
        with pytest.raises(UserError, match="would not be applied") as caught:
            engine_by_hand(tmp_path, {"sampler_seed": None, **hooks})
        assert caught.value.key == "default_hooks.param_scheduler"


def test_also_for_the_sampler_of_a_foreign_loader(tmp_path: Path) -> None:
    sampler: Any = DistributedSampler(Noisy(), num_replicas=1, rank=0)
    train = DataLoader(Noisy(), batch_size=2, sampler=sampler)
    with pytest.raises(UserError, match="all epochs would have the same order"):
        engine_by_hand(tmp_path, {}, scheduled=False, train=train)
    assert engine_by_hand(tmp_path, {}, scheduled=False, train=DataLoader(Noisy(), batch_size=2)).hooks == {}


def test_a_hook_can_be_left_out(tmp_path: Path) -> None:
    watch = Seen()
    engine_by_hand(tmp_path, {"sampler_seed": None, "watch": watch}, scheduled=False).train()
    first, *others = watch.epochs
    assert all(not list(differences(first, other)) for other in others), "all epochs are the same"


def test_the_builder_adds_no_second_hook_of_the_class(tmp_path: Path) -> None:
    """Under another name, the engine does not know it, and says so."""
    line = ["default_hooks=[]", "+hooks.mine._target_=hydraloop.hooks.ParamSchedulerHook"]
    with pytest.raises(UserError, match="would not be applied"):
        hydraloop.build(hydraloop.compose(line, folder=REPOSITORY), run_dir=tmp_path)


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
        ("default_hooks=[] scheduler=[] +default_hooks.sampler_seed=null", (), [SAME, "default_hooks is empty"]),
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
