"""ModeSwitchHook: what a loader (its workers, persistent ones too) yields in the last epochs, and the task's loss."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import ConcatDataset, Dataset, Subset

from examples.contrastive.augmented import Augmented
from hydraloop.data import build_loader
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.errors import UserError
from hydraloop.hooks.epoch_start import ModeSwitchHook
from hydraloop.tasks.task import Task
from tests.hooks import tiny_runs


class Flagged(Dataset[Tensor]):
    """Eight samples that say whether they were made with strong augmentation: `[1.0]` or `[0.0]`."""

    strong = True

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(self.strong)]), torch.zeros(1)

    def set_strong_augmentation(self, on: bool) -> None:
        self.strong = on


class Plain(Flagged):
    """Nothing to switch."""

    set_strong_augmentation = None  # type: ignore[assignment]


class Extra(Task):
    """An extra loss of 100, if it is on."""

    extra = False

    def set_extra_loss(self, on: bool) -> None:
        self.extra = on

    def forward(self, batch: Any) -> dict[str, Tensor]:
        outputs = super().forward(batch)
        return {"loss": outputs["loss"] + 100 * self.extra}


class ExtraModel(nn.Linear):
    """A model with the method; it has no loss."""

    told: list[bool]

    def set_extra_loss(self, on: bool) -> None:
        self.told = [*getattr(self, "told", []), on]


class Seen(Hook):
    """By epoch (from 1): the share of strong samples, and whether the extra loss was on."""

    priority = 90

    def __init__(self) -> None:
        self.strong: dict[int, set[float]] = {}
        self.extra: dict[int, set[bool]] = {}

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        epoch = engine.progress.epoch + 1
        self.strong.setdefault(epoch, set()).update(batch[0].flatten().tolist())
        self.extra.setdefault(epoch, set()).add(outputs["loss"].item() >= 100)


class Saving(Hook):
    """Asks for a checkpoint after two of the iterations: before the switch, and in the last epochs."""

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        if engine.progress.iteration in (3, 5):
            engine.request_checkpoint(f"at_{engine.progress.iteration}", agreed=True)


def engine_of(
    run_dir: Path,
    last: int,
    *,
    data: Dataset[Any] | None = None,
    task: Callable[..., Task] = Extra,
    model: nn.Module | None = None,
    workers: int = 0,
    persistent: bool = False,
    hooks: dict[str, Hook] | None = None,
    **settings: Any,
) -> tuple[Engine, Seen]:
    """Four epochs of two batches, of which the `last` ones are switched."""
    loader = build_loader(
        Flagged() if data is None else data,
        shuffle=True,
        batch_size=4,
        num_workers=workers,
        persistent_workers=persistent,
    )
    seen = Seen()
    engine = tiny_runs.engine_of(
        run_dir,
        {"mode_switch": ModeSwitchHook(num_last_epochs=last), "seen": seen, **(hooks or {})},
        task=task(nn.Linear(1, 1) if model is None else model, nn.MSELoss()),
        loaders=Loaders(loader),
        **{"max_epochs": 4, **settings},
    )
    return engine, seen


ON, OFF = {1.0}, {0.0}


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_exactly_the_last_epochs_are_switched_for_each_loader(workers: int, persistent: bool, tmp_path: Path) -> None:
    engine, seen = engine_of(tmp_path, 2, workers=workers, persistent=persistent)
    engine.train()
    assert seen.strong == {1: ON, 2: ON, 3: OFF, 4: OFF}
    assert seen.extra == {1: {False}, 2: {False}, 3: {True}, 4: {True}}


def test_a_run_resumed_in_the_last_epochs_is_switched_also_inside_an_epoch(tmp_path: Path) -> None:
    engine_of(tmp_path / "one", 2, hooks={"saving": Saving()})[0].train()
    for iteration, expected in ((3, {2: ON, 3: OFF, 4: OFF}), (5, {3: OFF, 4: OFF})):
        saved = tmp_path / "one" / "checkpoints" / f"at_{iteration}.pth"
        engine, seen = engine_of(tmp_path / f"from_{iteration}", 2, resume=saved)
        engine.train()
        assert seen.strong == expected
        assert seen.extra == {epoch: {flags == OFF} for epoch, flags in expected.items()}


@pytest.mark.parametrize(("last", "epochs"), [(4, 4), (15, 4)])
def test_a_shorter_run_is_switched_from_its_start_and_logs_it(
    last: int, epochs: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        engine, seen = engine_of(tmp_path, last, max_epochs=epochs)
        engine.train()
    assert set(seen.strong) == {1, 2, 3, 4}
    assert all(flags == OFF for flags in seen.strong.values())
    assert "switches from the start, as the run has 4 epochs" in caplog.text
    assert "epoch 1: strong augmentation off (Flagged), extra loss on (Extra)" in caplog.text


def test_by_iterations_the_last_epoch_may_be_a_part_of_one(tmp_path: Path) -> None:
    engine, seen = engine_of(tmp_path, 1, max_iters=5)
    engine.train()
    assert seen.strong == {1: ON, 2: ON, 3: OFF}


def test_what_was_left_switched_is_switched_back_at_the_start(tmp_path: Path) -> None:
    data = Flagged()
    data.set_strong_augmentation(False)
    engine, seen = engine_of(tmp_path, 1, data=data, max_epochs=2)
    engine.task.set_extra_loss(True)
    engine.train()
    assert (seen.strong, seen.extra) == ({1: ON, 2: OFF}, {1: {False}, 2: {True}})


def test_wrappers_are_searched_and_the_model_replaces_a_task_without_the_method(tmp_path: Path) -> None:
    inside = [Flagged(), Flagged()]
    data = ConcatDataset([Subset(inside[0], range(4)), Subset(Augmented(inside[1]), range(4))])
    model = ExtraModel(1, 1)
    engine_of(tmp_path, 1, data=data, task=Task, model=model, max_epochs=1)[0].train()
    assert [one.strong for one in inside] == [False, False]
    assert data.datasets[1].dataset.strong is False  # type: ignore[attr-defined]
    assert model.told == [True]


def test_without_a_method_to_call_it_is_refused_before_the_first_iteration(tmp_path: Path) -> None:
    engine, seen = engine_of(tmp_path, 2, data=Plain(), task=Task)
    with pytest.raises(UserError) as caught:
        engine.train()
    assert seen.strong == {}
    assert caught.value.key == "hooks.mode_switch"
    for name in ("set_strong_augmentation(on)", "set_extra_loss(on)", "Task", "Linear"):
        assert name in str(caught.value)


@pytest.mark.parametrize(("data", "task"), [(None, Task), (Plain(), Extra)])
def test_one_of_the_two_is_enough(data: Any, task: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        engine, seen = engine_of(tmp_path, 1, data=data, task=task, max_epochs=2)
        engine.train()
    assert "switches from epoch 2 on" in caplog.text
    assert seen.strong[2] == (OFF if data is None else ON)
    assert seen.extra[2] == {task is Extra}
