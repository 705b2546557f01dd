"""A run that is killed in the middle of a validation, while the model has the average, and is resumed."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.hooks.checkpoint.hook import CheckpointHook
from hydraloop.hooks.ema.hook import EMAHook
from tests.hooks.tiny_runs import bits, engine_of, same


class Copier(Hook):
    """Copies the run's files in the middle of a validation, as a kill would leave them; notes whose weights it had."""

    def __init__(self, folder: Path, epoch: int) -> None:
        self.folder, self.epoch = folder, epoch
        self.evaluated = ""
        self.trained: Mapping[str, Any] = {}

    def after_train_epoch(self, engine: Engine) -> None:
        self.trained = bits(engine.model)

    def before_val_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        if engine.progress.epoch == self.epoch and batch_idx == 1:
            self.evaluated = "raw" if same(bits(engine.model), self.trained) else "average"
            engine.checkpoints.settle()  # the kill comes after the thread has written the epoch's file
            shutil.copytree(engine.run_dir, self.folder)


class Watcher(Hook):
    """The raw weights at the beginning of each epoch, and what each validation found."""

    def __init__(self) -> None:
        self.began: list[Mapping[str, Any]] = []
        self.losses: list[float] = []

    def before_train_epoch(self, engine: Engine) -> None:
        self.began.append(bits(engine.model))

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        self.losses.append(metrics["loss"])


def hooks(**more: Hook) -> dict[str, Hook]:
    return {
        "watcher": Watcher(),
        "ema": EMAHook(update_buffers=True),
        "checkpoint": CheckpointHook(save_best="loss"),
        **more,
    }


@pytest.fixture
def killed(tmp_path: Path) -> Path:
    """The folder of a run that was killed in its second validation."""
    copier = Copier(tmp_path / "killed", epoch=2)
    engine_of(tmp_path / "running", hooks(copier=copier)).train()
    assert copier.evaluated == "average", "the model had it at that moment"
    return copier.folder


def test_it_resumes_with_the_raw_weights_like_the_run_that_was_not_killed(killed: Path, tmp_path: Path) -> None:
    whole, resumed = hooks(), hooks(copier=Copier(tmp_path, epoch=9))
    uninterrupted = engine_of(tmp_path / "whole", whole)
    uninterrupted.train()
    resume = killed / "checkpoints" / "epoch_2.pth"
    engine = engine_of(killed, resumed, resume=resume)
    engine.train()
    first, second = whole["watcher"], resumed["watcher"]
    assert isinstance(first, Watcher)
    assert isinstance(second, Watcher)
    assert same(second.began[0], first.began[2]), "the third epoch begins with the raw weights"
    assert second.losses == first.losses[1:], "the missed second validation runs first, on the average"
    assert same(bits(engine.model), bits(uninterrupted.model))
    assert same(resumed["ema"].state_dict()["averaged"], whole["ema"].state_dict()["averaged"])
    assert engine.best is not None
    assert uninterrupted.best is not None
    assert (engine.best.value, engine.best.iteration) == (uninterrupted.best.value, uninterrupted.best.iteration)
