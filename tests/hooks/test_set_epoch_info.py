"""SetEpochInfoHook: which objects get which epoch, and the warnings."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.hooks.epoch_start import DistSamplerSeedHook, SetEpochInfoHook
from hydraloop.tasks.task import Task
from tests.data.streams import stream_loader
from tests.hooks import tiny_runs


class Told:
    """Records the epochs."""

    def set_epoch(self, epoch: int) -> None:
        self.epochs = [*getattr(self, "epochs", []), epoch]


class TaskTold(Told, Task):
    """A task with the method."""


class ModelTold(Told, nn.Linear):
    """A model with the method."""


class Data(Dataset[tuple[Tensor, Tensor]]):
    """Eight samples with the last epoch that their data set was given, at first `[-1.0]`."""

    epoch = -1

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.tensor([float(self.epoch)]), torch.zeros(1)

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


class Stream(Data):
    """The same as a stream."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for index in range(8):
            yield self[index]


class Batches(Hook):
    """The distinct inputs of each epoch; asks for a checkpoint at the third iteration."""

    def __init__(self) -> None:
        self.inputs: dict[int, set[float]] = {}

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        self.inputs.setdefault(engine.progress.epoch, set()).update(batch[0].flatten().tolist())
        if engine.progress.iteration == 3:
            engine.request_checkpoint("at_3", agreed=True)


def engine_of(
    run_dir: Path,
    data: Any,
    *,
    task: type[Task] = Task,
    model: type[nn.Linear] = nn.Linear,
    workers: int = 0,
    persistent: bool = False,
    steps: int | None = None,
    **settings: Any,
) -> tuple[Engine, Batches]:
    """Three epochs of two batches."""
    seen = Batches()
    loader: Any = (
        build_loader(data, shuffle=True, batch_size=4, num_workers=workers, persistent_workers=persistent)
        if steps is None
        else stream_loader(data, train=True, batch_size=4, steps_per_epoch=steps)
    )
    hooks = {"sampler_seed": DistSamplerSeedHook(), "set_epoch_info": SetEpochInfoHook(), "seen": seen}
    task_of_model = task(model(1, 1), nn.MSELoss())
    return tiny_runs.engine_of(run_dir, hooks, task=task_of_model, loaders=Loaders(loader), **settings), seen


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])
def test_task_model_and_data_set_get_each_epoch_from_0(
    workers: int, persistent: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    told: dict[str, Any] = {"task": TaskTold, "model": ModelTold}
    engine, seen = engine_of(tmp_path, Data(), **told, workers=workers, persistent=persistent)
    engine.train()
    assert engine.task.epochs == [0, 1, 2]
    assert engine.model.epochs == [0, 1, 2]
    assert seen.inputs == {0: {0.0}, 1: {1.0}, 2: {2.0}}
    assert warnings(caplog) == []


def test_a_stream_gets_the_number_of_its_pass(tmp_path: Path) -> None:
    engine, seen = engine_of(tmp_path, Stream(), steps=1)
    engine.train()
    assert seen.inputs == {0: {0.0}, 1: {0.0}, 2: {1.0}}, "a pass has two batches"


def test_a_run_resumed_inside_an_epoch_tells_that_epoch_again(tmp_path: Path) -> None:
    engine_of(tmp_path / "one", Data(), task=TaskTold)[0].train()
    engine, seen = engine_of(
        tmp_path / "two", Data(), task=TaskTold, resume=tmp_path / "one" / "checkpoints" / "at_3.pth"
    )
    engine.train()
    assert engine.task.epochs == [1, 2]
    assert seen.inputs == {1: {1.0}, 2: {2.0}}


def test_objects_without_the_method_are_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = InMemoryDataset(torch.zeros(8, 1), torch.zeros(8, 1))
    engine_of(tmp_path, plain)[0].train()
    assert warnings(caplog) == ["hooks.set_epoch_info does nothing: there is no set_epoch(epoch) in Task or Linear"]
