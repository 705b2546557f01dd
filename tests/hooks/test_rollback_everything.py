"""A run that goes back ends as one without the bad batch, to the last bit, with every built-in hook and schedule."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import hydraloop.hooks
from hydraloop.data import build_loader
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.settings import Settings
from hydraloop.optim import TorchSchedule
from hydraloop.schemas import stored
from hydraloop.schemas.scheduler import OPTIONS as SCHEDULES
from hydraloop.tasks.classification import Classification
from hydraloop.tasks.metrics import Accuracy
from tests.helpers import differences
from tests.hooks.tiny_runs import load
from tests.marks import nightly
from tests.optim.scheduled import option

SAVED, LENGTH, EPOCHS = 5, 6, 3
"""The iteration of the checkpoint, the iterations in an epoch, and the epochs."""
OPTIONS: dict[str, dict[str, Any]] = {
    "anomaly_detection": {"check_nan": False},
    "checkpoint": {"by_epoch": False, "interval": SAVED},
    "early_stopping": {"patience": 100, "check_finite": False},
    "ema": {"begin_epoch": 2, "update_buffers": True},
    "freeze": {"modules": ["0", "1"], "iters": 7},
    "grad_clip": {"max_norm": 1.0},
    "logger": {"interval": 1},
    "memory_profiler": {"interval": 100},
    "mode_switch": {"num_last_epochs": 2},
    "num_class_check": {},
    "rollback": {"interval": 9},
    "sync_random_size": {"interval": 2},
    "tensorboard": {"histograms": 4},
}
"""What they change, they change after the checkpoint and before the bad loss is noticed."""
SLOW = {"profiler", "npu_profiler", "mlflow", "tensorboard", "wandb", "visualization"}
STEPS: dict[str, dict[str, Any]] = {
    "cosine_restart": {"periods": [1, 2]},
    "exponential": {"gamma": 0.9},
    "linear": {"end": 7},
    "multistep": {"milestones": [SAVED + 1, 9], "by_epoch": False},
    "onecycle": {"param": "weight_decay", "max_lr": 0.1},
    "plateau": {"patience": 0},
}


class Images(torch.utils.data.Dataset[Any]):
    """24 images `[1, 8, 8]` in two classes with random noise; one of them is not finite in one epoch."""

    classes = ("even", "odd")

    def __init__(self) -> None:
        self.images = torch.rand(LENGTH * 4, 1, 8, 8, generator=torch.Generator().manual_seed(0))
        self.bad, self.epoch, self.strong = (-1, -1), 0, 0.0

    def set_strong_augmentation(self, on: bool) -> None:
        self.strong = 0.5 * on

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index] + self.strong * torch.rand(1, 8, 8)
        return image * (math.nan if (self.epoch, index) == self.bad else 1.0), index % 2


class LeftOut(Hook):
    """Leaves out batches from the start."""

    def __init__(self, left_out: dict[int, set[int]]) -> None:
        self.left_out = left_out

    def before_train(self, engine: Engine) -> None:
        engine.progress.leave_out(self.left_out)


def hooks(names: set[str]) -> dict[str, Hook]:
    found: dict[str, Hook] = {}
    for group in ("default_hooks", "hooks"):
        for name, schema in stored(group):
            if name in names:
                found[name] = getattr(hydraloop.hooks, schema._target_.rpartition(".")[2])(**OPTIONS.get(name, {}))
    return found


def built_in_schedules(optimizer: optim.Optimizer) -> dict[str, Any]:
    run: dict[str, Any] = {"epochs": EPOCHS, "steps_per_epoch": LENGTH}
    return {name: option(name, optimizer, **run, **STEPS.get(name, {})) for name in SCHEDULES}


def in_steps(optimizer: optim.Optimizer) -> dict[str, Any]:
    names = ("multistep", "momentum")
    return {name: one for name, one in built_in_schedules(optimizer).items() if name in names}


def of_torch(optimizer: optim.Optimizer) -> dict[str, Any]:
    factory = partial(optim.lr_scheduler.MultiStepLR, milestones=[7, 9])
    return {"torch": TorchSchedule("torch", factory, optimizer, length=EPOCHS * LENGTH)}


def engine_of(
    run_dir: Path,
    hooks: dict[str, Hook],
    schedules: Callable[[optim.Optimizer], dict[str, Any]],
    bad: tuple[int, int],
    val_interval: int,
) -> Engine:
    run_dir.mkdir()
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)
    )
    model.num_classes = 2  # type: ignore[assignment]  # a plain number
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.01)
    data = Images()
    train = build_loader(data, shuffle=True, batch_size=4)
    data.bad = (bad[0], train.indices_at(bad[1], bad[0])[0])
    held_out = build_loader(Images(), shuffle=False, batch_size=4)
    return Engine(
        task=Classification(model, nn.CrossEntropyLoss(), {"accuracy": Accuracy()}),
        optimizer=optimizer,
        loaders=Loaders(train, held_out, held_out),
        hooks=hooks,
        schedules=schedules(optimizer),
        settings=Settings(device="cpu", max_epochs=EPOCHS, val_interval=val_interval, val_by_epoch=False),
        run_dir=run_dir,
    )


def result_of(engine: Engine) -> dict[str, Any]:
    """Everything that a run leaves, without times, and without what only going back leaves."""
    result = engine.train()
    assert (result.status, result.error) == ("finished", None)
    (path,) = (engine.run_dir / "checkpoints").glob(f"iter_{LENGTH * EPOCHS - 1}.pth")
    saved = load(path)
    del saved["meta"]
    for name in ("rollbacks", "left_out"):
        saved["hooks"].get("rollback", {}).pop(name, None)
    times = {"timestamp", "time", "data_time", "samples_per_second", "eta", "memory"}
    lines = [json.loads(line) for line in (engine.run_dir / "metrics.jsonl").read_text().splitlines()]
    records = [{name: value for name, value in record.items() if name not in times} for record in lines]
    return {
        "checkpoint": saved,
        # With a tracker, the records of the part that was given up stay in the file.
        "records": {(one["mode"], one["iteration"], "objects" in one): one for one in records},
        "best": None if engine.best is None else (engine.best.value, engine.best.iteration),
        "media": {path.name: path.read_bytes() for path in (engine.run_dir / "media").rglob("*.json")},
        "best_seen": engine.messages.read("best"),
        "validation": result.val_metrics,
        "test": result.test_metrics,
        "lrs": [group["lr"] for group in engine.optimizer.param_groups],
        "trained": [parameter.requires_grad for parameter in engine.model.parameters()],
        "modes": [module.training for module in engine.model.modules()],
    }


DEFAULT = {"rollback", *(name for name, _ in stored("default_hooks"))}
ALL = {name for group in ("default_hooks", "hooks") for name, _ in stored(group)}


@pytest.mark.parametrize(
    ("names", "schedules", "bad", "val_interval"),
    [
        pytest.param(ALL - SLOW, built_in_schedules, (1, 1), 2, id="every schedule"),
        pytest.param(ALL - SLOW, in_steps, (0, 5), 100, id="noticed in the next epoch"),
        pytest.param(DEFAULT, in_steps, (1, 1), 100, id="default hooks, a step after the checkpoint"),
        nightly(ALL - {"npu_profiler"}, of_torch, (1, 1), 2, id="every hook, a schedule of torch"),
    ],
)
def test_a_run_that_goes_back_ends_as_one_without_the_batch(
    names: set[str],
    schedules: Callable[[optim.Optimizer], dict[str, Any]],
    bad: tuple[int, int],
    val_interval: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a batch (epoch and index, from 0) that is not finite."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.setenv("WANDB_MODE", "offline")
    left_out = {bad[0]: {bad[1]}}
    run = engine_of(tmp_path / "run", hooks(names), schedules, bad, val_interval)
    found = result_of(run)
    assert (run.progress.left_out, run.checkpoints.resumed_from) == (
        left_out,
        tmp_path / "run" / "checkpoints" / f"iter_{SAVED}.pth",
    )
    without = {**hooks(names), "left_out": LeftOut(left_out)}
    expected = result_of(engine_of(tmp_path / "without", without, schedules, bad, val_interval))
    assert list(differences(found, expected)) == []
