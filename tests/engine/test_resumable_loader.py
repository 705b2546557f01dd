"""Train loaders that a user has made: each sample of an epoch is seen once, also by a run that is cut inside it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    Sampler,
    Subset,
    TensorDataset,
    WeightedRandomSampler,
)

from hydraloop.data import build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from hydraloop.hooks import DistSamplerSeedHook
from hydraloop.tasks.task import Task
from tests.helpers import differences, make_engine
from tests.ranks import on_ranks

BATCHES, SIZE = 10, 4


class Noisy(TensorDataset):
    """40 samples whose inputs get noise from the global generator."""

    def __getitem__(self, index: int) -> Any:
        number, *rest = super().__getitem__(index)
        return number, number + torch.rand(3), *rest


def data() -> Noisy:
    return Noisy(torch.arange(40.0))


class Batches:
    """A sized iterable of batches, in an order of the epoch."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Remember it."""
        self.epoch = epoch

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(40, generator=torch.Generator().manual_seed(self.epoch))
        yield from DataLoader(data(), sampler=order.tolist(), batch_size=SIZE)  # type: ignore[arg-type]


class Stateful(DataLoader[Any]):
    """A DataLoader with the methods of torchdata's StatefulDataLoader."""

    def __init__(self) -> None:
        super().__init__(data(), batch_size=SIZE, shuffle=True)
        self.order: list[int] = []
        self.yielded = 0
        self.loaded: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        state, self.loaded = self.loaded, None
        torch.rand(())  # torch's loaders draw a seed for their workers
        self.order, self.yielded = ([], 0) if state is None else (state["order"], state["yielded"])
        if state is None:
            self.order = torch.randperm(40).tolist()
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        while self.yielded < BATCHES:
            begin = self.yielded * SIZE
            self.yielded += 1
            yield self.collate_fn([data()[index] for index in self.order[begin : begin + SIZE]])

    def state_dict(self) -> dict[str, Any]:
        """The position of the last batch that was yielded."""
        return {"order": self.order, "yielded": self.yielded}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position of the next iteration."""
        self.loaded = state


class Custom(Sampler[int]):
    """Shuffles, in a way that nobody else knows."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(40).tolist())

    def __len__(self) -> int:
        return 40


def loader(dataset: Any = None, **options: Any) -> DataLoader[Any]:
    return DataLoader(data() if dataset is None else dataset, **{"batch_size": SIZE, **options})


def in_batches() -> list[Any]:
    torch.manual_seed(6)
    return list(loader())


def shuffled_by_epoch() -> Any:
    return DistributedSampler(data(), num_replicas=1, rank=0)


AT_EPOCHS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: loader(shuffle=True),
    "shuffle, workers": lambda: loader(shuffle=True, num_workers=2),
}
"""These continue exactly only at the end of an epoch."""
ANYWHERE: dict[str, Callable[[], Any]] = {
    "in order": loader,
    "set_epoch": lambda: loader(sampler=shuffled_by_epoch()),
    "set_epoch, batch sampler": lambda: DataLoader(
        data(), batch_sampler=BatchSampler(shuffled_by_epoch(), SIZE, drop_last=False)
    ),
    "iterable": Batches,
    "list": in_batches,
    "state": Stateful,
}


class Watch(Hook):
    """Notes the samples of each iteration, and asks for checkpoints."""

    def __init__(self, save_at: int | None) -> None:
        self.samples: list[list[float]] = []
        self.save_at = save_at

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        self.samples.append(batch[0].tolist())

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        if engine.progress.iteration == self.save_at:
            engine.request_checkpoint("cut", agreed=True)
            engine.request_stop("cut", agreed=True)


class Dropping(Task):
    """A task that draws in each iteration."""

    def forward(self, batch: Any) -> dict[str, Any]:
        return {"loss": self.model(batch[1] / 40).square().mean()}


def run(
    folder: Path, train: Any, *, save_at: int | None = None, distributed: Distributed | None = None, **settings: Any
) -> tuple[list[list[float]], dict[str, Any]]:
    """Train for three epochs, or until `save_at`. Returns the samples of each iteration and the weights."""
    torch.manual_seed(5 if "resume" not in settings else 999)
    random.seed(torch.initial_seed())
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    watch = Watch(save_at)
    engine = make_engine(
        folder,
        {"sampler_seed": DistSamplerSeedHook(), "watch": watch},
        train=train,
        task=Dropping(model, None),
        optimizer=torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9),
        distributed=distributed,
        max_epochs=3,
        accumulate=2,
        **settings,
    )
    engine.train()
    return watch.samples, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", [*AT_EPOCHS, *ANYWHERE])
def test_a_run_that_is_cut_again_and_again_sees_each_sample_as_one_that_is_not(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    new = (AT_EPOCHS | ANYWHERE)[name]
    whole, weights = run(tmp_path, new())
    assert all(value.isfinite().all() for value in weights.values())
    assert len(whole) == 3 * BATCHES
    epochs = [sum(whole[begin : begin + BATCHES], []) for begin in range(0, 3 * BATCHES, BATCHES)]  # noqa: RUF017
    assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    found, options = list[list[float]](), dict[str, Any]()
    # Twice inside an epoch, at its end, inside the next one, and at the end of training.
    for cut in (10, 20, 30) if name in AT_EPOCHS else (4, 8, 10, 16, 30):
        part, resumed = run(tmp_path, new(), save_at=cut, **options)
        found += part
        assert found == whole[:cut]
        options = {"resume": tmp_path / "checkpoints" / "cut.pth"}
    assert list(differences(resumed, weights)) == []
    assert "another order" not in caplog.text


@pytest.mark.parametrize("new", [*AT_EPOCHS.values(), lambda: loader(sampler=Custom()), Stateful])
def test_an_epoch_continues_in_another_order_with_one_warning(
    new: Callable[[], Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut = tmp_path / "checkpoints" / "cut.pth"
    run(tmp_path, new(), save_at=14)
    checkpoint = torch.load(cut, weights_only=True)
    checkpoint.pop("data", None)  # of a loader with a state, which another loader may have saved
    torch.save(checkpoint, cut)
    rest, _ = run(tmp_path, new(), resume=cut)
    assert len(rest) == 16
    assert sorted(sample for batch in rest[-BATCHES:] for sample in batch) == list(range(40))
    assert caplog.text.count("the rest of this epoch has another order") == 1


@pytest.mark.parametrize(
    ("before", "now"),
    [
        ({}, {"samples": 39}),
        ({}, {"sampler": WeightedRandomSampler([1.0] * 40, 40)}),
        ({"sampler": WeightedRandomSampler([1.0] * 40, 40)}, {"sampler": WeightedRandomSampler([1.0, 9.0] * 20, 40)}),
        ({"ready": True}, {"ready": True, "samples": 39}),
        ({"ready": True}, {}),
    ],
)
def test_another_order_is_refused_inside_an_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, before: dict[str, Any], now: dict[str, Any]
) -> None:
    """A folder has a file more, or other weights: the epochs are as long, but samples would be seen twice or never."""
    cut = tmp_path / "checkpoints" / "cut.pth"

    def ordered(samples: int = 40, ready: bool = False, **options: Any) -> Any:
        few = Subset(data(), range(samples))
        return loader(few, shuffle=True) if ready else build_loader(few, shuffle=True, batch_size=SIZE, **options)

    run(tmp_path, ordered(**before), save_at=14)
    with pytest.raises(UserError, match="with the seed 0, whose samples had another order") as caught:
        run(tmp_path, ordered(**now), resume=cut)
    assert caught.value.key == "data.train"
    rest, _ = run(tmp_path, ordered(**now), resume=cut, resume_strict=False)
    assert len(rest) == 16
    assert "the batches differ from those of the saved run" in caplog.text
    run(tmp_path, ordered(**before), save_at=10)
    assert len(run(tmp_path, ordered(**now), resume=cut)[0]) == 20


def _whole_and_resumed(distributed: Distributed, folder: str) -> tuple[Any, Any]:
    part = {"num_replicas": distributed.world_size, "rank": distributed.rank}

    def train() -> DataLoader[Any]:
        return loader(sampler=DistributedSampler(data(), **part), batch_size=2)  # type: ignore[arg-type]

    whole = run(Path(folder), train(), distributed=distributed)
    run(Path(folder), train(), distributed=distributed, save_at=14)
    return whole, run(Path(folder), train(), distributed=distributed, resume=Path(folder) / "checkpoints" / "cut.pth")


@pytest.mark.slow
def test_ranks_with_a_distributed_sampler_resume_inside_an_epoch(tmp_path: Path) -> None:
    (first, first_rest), (second, second_rest) = on_ranks(2, _whole_and_resumed, str(tmp_path))
    for whole, rest in ((first, first_rest), (second, second_rest)):
        assert rest[0] == whole[0][14:]
        assert list(differences(rest[1], whole[1])) == []
    epoch = [sample for batch in first[0][:BATCHES] + second[0][:BATCHES] for sample in batch]
    assert sorted(epoch) == list(range(40))


def _refused(distributed: Distributed, folder: str) -> str:
    with pytest.raises(UserError) as caught:
        run(Path(folder), loader(shuffle=True), distributed=distributed)
    return str(caught.value)


def test_ranks_need_a_sampler_that_splits_an_epoch(tmp_path: Path) -> None:
    for message in on_ranks(2, _refused, str(tmp_path)):
        assert "DataLoader with RandomSampler does not split an epoch between 2 processes" in message
        assert "num_replicas" in message
