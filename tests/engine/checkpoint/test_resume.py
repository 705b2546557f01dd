"""Resume: a run that was cut ends with the same numbers, to the last bit, as one that was not.

Real loaders and streams, dropout, batch normalisation, momentum, a cosine schedule, clipping and an average. The run
is cut several times: each part is resumed from a checkpoint of the part before, in a process state that has moved on.
Everything in the last checkpoints is compared with that of the uncut run.
"""

from __future__ import annotations

import json
import multiprocessing
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler, Dataset, IterableDataset, WeightedRandomSampler

from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.engine.batch_transfer import one_ahead
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.named_optimizers import OptimizerSet
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
from tests.data.streams import stream_loader
from tests.helpers import differences, make_engine
from tests.ranks import on_ranks

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


class Points:
    """A generator class: the samples of a data set in another order in each pass. An epoch ends inside a pass."""

    def __init__(self, data: Any) -> None:
        self.data, self.epoch = data, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def order(self) -> list[int]:
        return random.Random(self.epoch).sample(range(len(self.data)), len(self.data))

    def __iter__(self) -> Iterator[Any]:
        yield from (self.data[number] for number in self.order())


class StatefulPoints(Points, IterableDataset[Any]):
    """As `Points`, with a state and a split."""

    def __init__(self, data: Any, part: tuple[int, int] = (0, 1)) -> None:
        super().__init__(data)
        self._part, self._read, self._start = part, 0, 0

    def split(self, index: int, count: int) -> StatefulPoints:
        return StatefulPoints(self.data, (index, count))

    def state_dict(self) -> dict[str, int]:
        return {"read": self._read}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._start = state["read"]

    def __iter__(self) -> Iterator[Any]:
        index, count = self._part
        order = self.order()[index::count]
        self._read, self._start = self._start, 0
        while self._read < len(order):
            self._read += 1
            yield self.data[order[self._read - 1]]


STREAMS = {"stream": StatefulPoints, "skipped stream": Points}


def _train_loader(data: Any, order: str, workers: int = 0, **ranks: Any) -> Any:
    if order in STREAMS:
        options = {"steps_per_epoch": LENGTH, "num_workers": workers, "skip_on_resume": order == "skipped stream"}
        return stream_loader(STREAMS[order](Drawing(data)), train=True, seed=7, **options, **ranks)
    weighted = WeightedRandomSampler([1.0] * 10 + [3.0] * 16, SAMPLES)
    samplers: dict[str, Any] = {
        "weighted": {"sampler": weighted},
        "batches": {"batch_sampler": BatchSampler(weighted, BATCH, drop_last=False)},
    }
    data = Drawing(data) if order == "drawing" else data
    return build_loader(data, shuffle=True, seed=7, batch_size=BATCH, **samplers.get(order, {}), **ranks)


def _engine(
    run_dir: Path,
    seed: int,
    *,
    accumulate: int = 1,
    by_epoch: bool = False,
    order: str = "shuffled",
    workers: int = 0,
    distributed: Distributed | None = None,
    **settings: Any,
) -> Engine:
    """A run whose data and draws are the same for any `seed`; the initial weights are not."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(SAMPLES, 5, generator=generator)
    data = InMemoryDataset(inputs, (inputs[:, :3] + torch.randn(SAMPLES, 3, generator=generator)).argmax(1))
    seed_everything(seed)
    ranks = {} if distributed is None else {"rank": distributed.rank, "world_size": distributed.world_size}
    train = _train_loader(data, order, workers, **ranks)
    val = build_loader(data, shuffle=False, seed=7, batch_size=10, **ranks)
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
    return make_engine(
        run_dir,
        hooks,
        train=train,
        val=val,
        test=val,
        task=Classification(model, nn.CrossEntropyLoss(), {"accuracy": Accuracy()}),
        optimizer=optimizer,
        schedules=_schedules(optimizer, accumulate, by_epoch=by_epoch),
        seed=7,
        distributed=distributed,
        **{"max_epochs": EPOCHS, "accumulate": accumulate, **settings},
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
    for of_process in ("time", "seconds", "records"):
        del checkpoint["meta"][of_process]
    del checkpoint["hooks"]["checkpoint"]
    return checkpoint


def _compare(tmp_path: Path, cuts: list[str], last: str, **options: Any) -> None:
    straight = previous = tmp_path / "straight"
    uncut = _engine(straight, 1, **options)
    before = set(multiprocessing.active_children())  # the ranks of other tests
    uncut.train()
    assert set(multiprocessing.active_children()) <= before, "workers end with the run"
    uncut.distributed.barrier()
    expected = _last(straight, last)
    weights = expected["state_dict"]
    assert list(differences(weights, _last(straight, cuts[0])["state_dict"])), "training changes the weights"
    assert list(differences(weights, expected["hooks"]["ema"]["averaged"])), "the average is another one"
    for cut in cuts:
        resumed = tmp_path / f"from {cut}"
        engine = _engine(resumed, 2, resume=previous / "checkpoints" / cut, **options)
        engine.train()
        engine.distributed.barrier()
        previous = resumed
        assert list(differences(_last(resumed, last), expected)) == [], cut
        assert engine.metrics == uncut.metrics, cut
        assert engine.evaluator.test_metrics == uncut.evaluator.test_metrics, cut
        records = _records(resumed)
        assert records, cut
        assert records == _records(straight)[-len(records) :], cut


@pytest.mark.parametrize(("accumulate", "by_epoch"), [(1, True), (3, False)])
def test_cut_at_an_epochs_end(tmp_path: Path, accumulate: int, by_epoch: bool) -> None:
    cuts = ["epoch_1.pth", "epoch_2.pth", "epoch_3.pth"]
    _compare(tmp_path, cuts, "epoch_4.pth", accumulate=accumulate, by_epoch=by_epoch)


def test_training_by_iteration_cut_at_an_epochs_end(tmp_path: Path) -> None:
    _compare(tmp_path, ["epoch_1.pth", "epoch_2.pth"], "iter_19.pth", accumulate=3, max_iters=19)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_cut_inside_an_epoch(tmp_path: Path, accumulate: int) -> None:
    cuts = ["iter_3.pth", "iter_10.pth", "iter_14.pth", "iter_20.pth"]
    _compare(tmp_path, cuts, "iter_28.pth", accumulate=accumulate, save_by_epoch=False)


CUTS = ["iter_3.pth", "iter_7.pth", "iter_20.pth"]


@pytest.mark.parametrize(
    ("order", "workers"),
    [
        ("weighted", 0),
        ("batches", 0),
        ("drawing", 0),
        ("stream", 0),
        ("stream", 2),
        ("skipped stream", 0),
        ("skipped stream", 2),
    ],
)
def test_cut_with_another_order(tmp_path: Path, order: str, workers: int) -> None:
    _compare(tmp_path, CUTS, "iter_28.pth", accumulate=3, save_by_epoch=False, order=order, workers=workers)


def _one_ahead(batches: Any, move: Any, device: torch.device, *, ahead: bool) -> Iterator[Any]:
    """Fetch one batch ahead, as on a device with streams."""
    return one_ahead(iter(batches), move, lambda moved: moved) if ahead else map(move, batches)


@pytest.mark.parametrize("accumulate", [2, 6])
def test_no_batch_of_a_stream_is_lost_if_one_is_fetched_ahead(
    accumulate: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hydraloop.engine.batches.prefetched", _one_ahead)
    options = {"accumulate": accumulate, "save_by_epoch": False, "order": "stream", "workers": 1}
    cuts = [f"iter_{iteration}.pth" for iteration in (accumulate, 7, 14 + accumulate)]
    _compare(tmp_path, cuts, "iter_28.pth", **options)


def _compare_on_rank(distributed: Distributed, folder: str, order: str) -> int:
    options = {"accumulate": 3, "save_by_epoch": False, "order": order, "distributed": distributed}
    _compare(Path(folder), CUTS, "iter_28.pth", **options)
    return 1


@pytest.mark.slow
@pytest.mark.parametrize("order", STREAMS)
def test_streams_on_ranks(tmp_path: Path, order: str) -> None:
    on_ranks(2, _compare_on_rank, str(tmp_path), order)


def test_cut_inside_and_at_the_end_of_a_limited_epoch(tmp_path: Path) -> None:
    limits = {"limit_train_batches": 5, "limit_val_batches": 0.5}
    cuts = ["iter_3.pth", "iter_5.pth", "iter_13.pth"]
    _compare(tmp_path, cuts, "iter_20.pth", accumulate=3, save_by_epoch=False, **limits)


def test_cut_with_several_optimizers(tmp_path: Path) -> None:
    _compare(tmp_path, CUTS, "iter_28.pth", accumulate=3, save_by_epoch=False, several=True)


def test_cut_with_validation_by_iteration(tmp_path: Path) -> None:
    cuts = ["iter_5.pth", "iter_7.pth", "iter_12.pth"]
    options = {"val_by_epoch": False, "val_interval": 5}
    _compare(tmp_path, cuts, "iter_28.pth", save_by_epoch=False, **options)


def test_cut_between_an_epochs_last_batch_and_its_end_with_both_due(tmp_path: Path) -> None:
    """The epoch ends before its validation, as it does in a run that was not cut."""
    options = {"val_by_epoch": False, "val_interval": 7, "by_epoch": True}
    _compare(tmp_path, ["iter_7.pth", "iter_14.pth"], "iter_28.pth", save_by_epoch=False, **options)


def test_a_finished_run_resumed_from_its_last_iteration_has_ended_its_last_epoch(tmp_path: Path) -> None:
    straight = _engine(tmp_path / "straight", 1, save_by_epoch=False)
    straight.train()
    last = tmp_path / "straight" / "checkpoints" / "iter_28.pth"
    resumed = _engine(tmp_path / "resumed", 2, save_by_epoch=False, resume=last)
    resumed.train()
    assert resumed.progress == straight.progress
    assert resumed.evaluator.test_metrics == straight.evaluator.test_metrics


@pytest.mark.parametrize(
    ("batch", "lines"), [(BATCH, []), (2, ["a global batch has 2 samples, and had 4 in the checkpoint"])]
)
def test_only_another_size_of_a_global_batch_is_in_the_log(
    batch: int, lines: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The epochs of a run that is resumed on other ranks have other lengths; a line says why."""
    _engine(tmp_path / "straight", 1, max_epochs=1).train()
    monkeypatch.setattr(f"{__name__}.BATCH", batch)
    resumed = _engine(tmp_path / "resumed", 2, resume=tmp_path / "straight" / "checkpoints" / "epoch_1.pth")
    with caplog.at_level("INFO"):
        resumed.validate()
    assert [line for line in caplog.messages if "global batch" in line] == lines


@pytest.mark.parametrize("evaluation", ["validate", "test"])
def test_an_evaluation_before_training_changes_nothing(tmp_path: Path, evaluation: str) -> None:
    _engine(tmp_path / "straight", 1).train()
    resumed = _engine(tmp_path / "resumed", 2, resume=tmp_path / "straight" / "checkpoints" / "epoch_2.pth")
    getattr(resumed, evaluation)()
    resumed.train()
    last = _last(tmp_path / "straight", "epoch_4.pth")
    assert list(differences(_last(tmp_path / "resumed", "epoch_4.pth"), last)) == []
