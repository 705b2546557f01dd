"""The mount point at_position: hooks there set the state of an uninterrupted run."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hydraloop.data import build_loader
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.hooks import CheckpointHook, ModeSwitchHook, SetEpochInfoHook
from hydraloop.tasks.task import Task
from tests.helpers import at, batches, differences, make_engine
from tests.hooks.tiny_runs import load


def saving(name: str, nth: int) -> Hook:
    """Ask for a checkpoint after the `nth` iteration."""
    return at("after_train_iter", lambda engine: engine.request_checkpoint(name, agreed=True), nth=nth)


def draw(engine: Engine) -> None:
    torch.rand(3)
    random.random()


def test_random_numbers_drawn_there_do_not_change_what_follows(tmp_path: Path) -> None:
    """The random state of the checkpoint is restored after it."""

    def run(folder: str, *hooks: Hook, **settings: Any) -> dict[str, Any]:
        torch.manual_seed(0)
        random.seed(0)
        net = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        named: dict[str, Hook] = {
            "draw": at("at_position", draw, nth=0),
            "checkpoint": CheckpointHook(),
            **{f"mine_{index}": hook for index, hook in enumerate(hooks)},
        }
        options: dict[str, Any] = {"train": batches(3), "max_epochs": 2, "resume_strict": False, **settings}
        make_engine(tmp_path / folder, named, task=Task(net, nn.MSELoss()), **options).train()
        saved = load(tmp_path / folder / "checkpoints" / "epoch_2.pth")
        return {name: saved[name] for name in ("state_dict", "rng", "progress")}

    whole = run("whole", saving("inside", 2))
    found = run("resumed", resume=tmp_path / "whole" / "checkpoints" / "inside.pth")
    assert list(differences(found, whole)) == []


class Data(Dataset[tuple[Tensor, Tensor]]):
    """Eight samples."""

    strong = True

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.ones(1), torch.zeros(1)

    def set_strong_augmentation(self, on: bool) -> None:
        self.strong = on


class Told(Task):
    """A task whose evaluation could depend on the epoch and on the extra loss."""

    epoch, extra = -1, False

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def set_extra_loss(self, on: bool) -> None:
        self.extra = on


class Seen(Hook):
    """By iteration: what the hooks have set, in each validation and each iteration."""

    priority = 95

    def __init__(self) -> None:
        self.states: dict[str, Any] = {}
        self.at_start: Any = None

    def before_train(self, engine: Engine) -> None:
        self.at_start = engine.loaders.train.epoch  # type: ignore[union-attr]

    def before_val(self, engine: Engine) -> None:
        self._note("val", engine)

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        self._note("train", engine)

    def _note(self, mode: str, engine: Engine) -> None:
        task, data = engine.task, engine.loaders.train.dataset  # type: ignore[union-attr]
        self.states[f"{mode} {engine.progress.iteration}"] = (task.epoch, task.extra, data.strong)


def seen_in(run_dir: Path, *hooks: Hook, **settings: Any) -> Seen:
    """Four epochs of two batches, the last two of them in the other mode, with a checkpoint before each validation."""
    net, seen = nn.Linear(1, 1), Seen()
    data: Any = build_loader(Data(), shuffle=True, batch_size=4)
    named: dict[str, Hook] = {
        "mode_switch": ModeSwitchHook(num_last_epochs=2),
        "set_epoch_info": SetEpochInfoHook(),
        "checkpoint": CheckpointHook(),
        "seen": seen,
        **{f"mine_{index}": hook for index, hook in enumerate(hooks)},
    }
    run_dir.mkdir()
    make_engine(
        run_dir,
        named,
        train=data,
        val=batches_of_one(),
        task=Told(net, nn.MSELoss()),
        optimizer=torch.optim.SGD(net.parameters(), lr=0.01),
        **{"max_epochs": 4, "sanity_val_steps": 0, **settings},
    ).train()
    return seen


def batches_of_one() -> list[Any]:
    return [(torch.ones(1, 1), torch.zeros(1, 1))]


@pytest.mark.parametrize("epoch", [1, 2, 3])
def test_a_missed_validation_sees_the_epoch_and_the_mode_that_it_would_have_seen(epoch: int, tmp_path: Path) -> None:
    whole = seen_in(tmp_path / "whole")
    assert whole.at_start == 0
    path = tmp_path / "whole" / "checkpoints" / f"epoch_{epoch}.pth"
    resumed = seen_in(tmp_path / "resumed", resume=path)
    assert resumed.at_start == epoch, "the sampler's"
    missed = f"val {2 * epoch}"
    assert resumed.states[missed] == whole.states[missed]
    assert resumed.states == {name: state for name, state in whole.states.items() if name in resumed.states}
