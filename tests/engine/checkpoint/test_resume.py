"""Resume: a run that was cut ends with the same numbers, to the last bit, as one that was not.

Real loaders that shuffle, dropout, batch normalisation, momentum, a cosine schedule, clipping and an average. The uncut
run leaves a checkpoint at every cut; each is resumed in a process state that has moved on, and everything in the last
checkpoints is compared.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, Dataset, WeightedRandomSampler

from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.named_optimizers import OptimizerSet
from hydraloop.engine.run import Settings
from hydraloop.engine.seeding import rng_state, seed_everything, set_rng_state
from hydraloop.hooks import (
    CheckpointHook,
    DistSamplerSeedHook,
    EMAHook,
    GradClipHook,
    IterTimerHook,
    LoggerHook,
    ParamSchedulerHook,
    RuntimeInfoHook,
)
from hydraloop.optim import Cosine, Length, Plateau, build_schedule
from hydraloop.tasks.metrics import Accuracy
from hydraloop.tasks.per_sample import Classification
from tests.helpers import EngineWithNeededHooks, differences

EPOCHS, SAMPLES, BATCH, LENGTH = 4, 26, 4, 7
"""Of 7 batches, the last one of 2 samples."""


@pytest.fixture(autouse=True)
def _generators_restored() -> Iterator[None]:
    before = rng_state()
    yield
    set_rng_state(before)


class Noise(Hook):
    """Draws from every generator in each iteration, as an augmentation would, and changes the inputs by it."""

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        batch[0].add_(random.gauss() + np.random.randn() + torch.randn(()), alpha=0.05)


def _schedules(optimizer: torch.optim.Optimizer, accumulate: int, *, by_epoch: bool) -> dict[str, Any]:
    steps_per_epoch = -(-LENGTH // accumulate)
    length = Length(EPOCHS, EPOCHS * steps_per_epoch, steps_per_epoch)
    plateau = Plateau(patience=0, factor=0.5)
    return {
        "cosine": build_schedule("cosine", Cosine(), optimizer, length, by_epoch=by_epoch),
        "plateau": build_schedule("plateau", plateau, optimizer, length, monitor="loss"),
    }


def _train_loader(data: Any, order: str) -> Any:
    weighted = WeightedRandomSampler([1.0] * 10 + [3.0] * 16, SAMPLES)
    options: dict[str, Any] = {
        "shuffled": {},
        "drawing": {},
        "weighted": {"sampler": weighted},
        "batches": {"batch_sampler": BatchSampler(weighted, BATCH, drop_last=False)},
    }[order]
    return build_loader(data, shuffle=True, seed=7, batch_size=BATCH, **options)


def _engine(
    run_dir: Path, seed: int, *, accumulate: int = 1, by_epoch: bool = False, order: str = "shuffled", **settings: Any
) -> Engine:
    """A run whose data and draws are the same for any `seed`; the initial weights are not."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 5, generator=generator)
    data = InMemoryDataset(inputs, (inputs[:, :3] + torch.randn(SAMPLES, 3, generator=generator)).argmax(1))
    seed_everything(seed)
    train = _train_loader(Drawing(data) if order == "drawing" else data, order)
    val = build_loader(data, shuffle=False, seed=7, batch_size=10)
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3))
    optimizer: torch.optim.Optimizer
    if settings.pop("several", False):
        matrix, *rest = [*model.parameters()]
        groups = [{"params": rest[:2], "weight_decay": 0.1}, {"params": rest[2:]}]
        optimizer = OptimizerSet(
            {"matrix": torch.optim.SGD([matrix], lr=0.2, momentum=0.9), "rest": torch.optim.AdamW(groups)}
        )
    else:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9, weight_decay=0.01)
    hooks: dict[str, Hook] = {
        "runtime_info": RuntimeInfoHook(),
        "timer": IterTimerHook(),
        "sampler_seed": DistSamplerSeedHook(),
        "noise": Noise(),
        "grad_clip": GradClipHook(max_norm=1.0),
        "ema": EMAHook(momentum=0.05, update_buffers=True),
        "logger": LoggerHook(interval=3),
        "param_scheduler": ParamSchedulerHook(),
        "checkpoint": CheckpointHook(interval=1, by_epoch=settings.pop("save_by_epoch", True)),
    }
    return EngineWithNeededHooks(
        task=Classification(model, nn.CrossEntropyLoss(), {"accuracy": Accuracy()}),
        optimizer=optimizer,
        loaders=Loaders(train, val, val),
        hooks=hooks,
        schedules=_schedules(optimizer, accumulate, by_epoch=by_epoch),
        settings=Settings(**{"device": "cpu", "max_epochs": EPOCHS, "accumulate": accumulate, **settings}),
        run_dir=run_dir,
        seed=7,
    )


class Drawing(Dataset[tuple[Tensor, Tensor]]):
    """Augments the samples of another data set with numbers from every generator."""

    def __init__(self, data: InMemoryDataset) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs, target = self.data[index]
        return inputs + 0.1 * (random.gauss() + np.random.randn() + torch.randn(())), target


def _records(run_dir: Path) -> list[dict[str, Any]]:
    """The records of training without times."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    times = {"time", "data_time", "samples_per_second", "eta", "timestamp", "memory"}
    return [{name: value for name, value in line.items() if name not in times} for line in lines]


def _last(run_dir: Path, name: str) -> dict[str, Any]:
    """What the last checkpoint holds of the run itself: no clock, no file names, no length of its record log."""
    checkpoint: dict[str, Any] = torch.load(run_dir / "checkpoints" / name, weights_only=True)
    del checkpoint["meta"]["time"], checkpoint["meta"]["records"], checkpoint["hooks"]["checkpoint"]
    return checkpoint


def _compare(tmp_path: Path, cuts: list[str], last: str, **options: Any) -> None:
    straight = tmp_path / "straight"
    straight.mkdir()
    uncut = _engine(straight, 1, **options)
    uncut.train()
    expected = _last(straight, last)
    weights = expected["state_dict"]
    assert list(differences(weights, _last(straight, cuts[0])["state_dict"])), "training changes the weights"
    assert list(differences(weights, expected["hooks"]["ema"]["averaged"])), "the average is another one"
    for cut in cuts:
        resumed = tmp_path / f"from {cut}"
        resumed.mkdir()
        engine = _engine(resumed, 2, resume=straight / "checkpoints" / cut, **options)
        engine.train()
        assert list(differences(_last(resumed, last), expected)) == [], cut
        assert engine.metrics == uncut.metrics, cut
        assert engine.evaluator.test_metrics == uncut.evaluator.test_metrics, cut
        records = _records(resumed)
        assert records, cut
        assert records == _records(straight)[-len(records) :], cut


@pytest.mark.parametrize("by_epoch", [False, True], ids=["schedule by step", "schedule by epoch"])
@pytest.mark.parametrize("accumulate", [1, 3])
def test_cut_at_an_epochs_end(tmp_path: Path, accumulate: int, by_epoch: bool) -> None:
    cuts = ["epoch_1.pth", "epoch_2.pth", "epoch_3.pth"]
    _compare(tmp_path, cuts, "epoch_4.pth", accumulate=accumulate, by_epoch=by_epoch)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_training_by_iteration_cut_at_an_epochs_end(tmp_path: Path, accumulate: int) -> None:
    _compare(tmp_path, ["epoch_1.pth", "epoch_2.pth"], "iter_19.pth", accumulate=accumulate, max_iters=19)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_cut_inside_an_epoch(tmp_path: Path, accumulate: int) -> None:
    cuts = ["iter_3.pth", "iter_10.pth", "iter_14.pth", "iter_20.pth"]
    _compare(tmp_path, cuts, "iter_28.pth", accumulate=accumulate, save_by_epoch=False)


@pytest.mark.parametrize("order", ["weighted", "batches", "drawing"])
def test_cut_with_another_order(tmp_path: Path, order: str) -> None:
    cuts = ["iter_3.pth", "iter_7.pth", "iter_20.pth"]
    _compare(tmp_path, cuts, "iter_28.pth", accumulate=3, save_by_epoch=False, order=order)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_cut_inside_and_at_the_end_of_a_limited_epoch(tmp_path: Path, accumulate: int) -> None:
    limits = {"limit_train_batches": 5, "limit_val_batches": 0.5}
    cuts = ["iter_3.pth", "iter_5.pth", "iter_13.pth"]
    _compare(tmp_path, cuts, "iter_20.pth", accumulate=accumulate, save_by_epoch=False, **limits)


def test_cut_with_several_optimizers(tmp_path: Path) -> None:
    cuts = ["iter_3.pth", "iter_7.pth", "iter_20.pth"]
    _compare(tmp_path, cuts, "iter_28.pth", accumulate=3, save_by_epoch=False, several=True)


def test_cut_with_validation_by_iteration(tmp_path: Path) -> None:
    cuts = ["iter_5.pth", "iter_7.pth", "iter_12.pth"]
    options = {"val_by_epoch": False, "val_interval": 5}
    _compare(tmp_path, cuts, "iter_28.pth", save_by_epoch=False, **options)


def test_cut_between_an_epochs_last_batch_and_its_end_with_both_due(tmp_path: Path) -> None:
    """The epoch ends before its validation, as it does in a run that was not cut."""
    options = {"val_by_epoch": False, "val_interval": 7, "by_epoch": True}
    _compare(tmp_path, ["iter_7.pth", "iter_14.pth"], "iter_28.pth", save_by_epoch=False, **options)


def test_a_finished_run_resumed_from_its_last_iteration_has_ended_its_last_epoch(tmp_path: Path) -> None:
    for name in ("straight", "resumed"):
        (tmp_path / name).mkdir()
    straight = _engine(tmp_path / "straight", 1, save_by_epoch=False)
    straight.train()
    last = tmp_path / "straight" / "checkpoints" / "iter_28.pth"
    resumed = _engine(tmp_path / "resumed", 2, save_by_epoch=False, resume=last)
    resumed.train()
    assert resumed.progress == straight.progress
    assert resumed.evaluator.test_metrics == straight.evaluator.test_metrics


@pytest.mark.parametrize("evaluation", ["validate", "test"])
def test_an_evaluation_before_training_changes_nothing(tmp_path: Path, evaluation: str) -> None:
    for name in ("straight", "resumed"):
        (tmp_path / name).mkdir()
    _engine(tmp_path / "straight", 1).train()
    resumed = _engine(tmp_path / "resumed", 2, resume=tmp_path / "straight" / "checkpoints" / "epoch_2.pth")
    getattr(resumed, evaluation)()
    resumed.train()
    last = _last(tmp_path / "straight", "epoch_4.pth")
    assert list(differences(_last(tmp_path / "resumed", "epoch_4.pth"), last)) == []
