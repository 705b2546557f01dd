"""Train loaders that a user has made: each sample of an epoch is seen once, also by a run that is cut inside it."""

from __future__ import annotations

import logging
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
    RandomSampler,
    Sampler,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from hydraloop.data import build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.settings import Settings
from hydraloop.errors import UserError
from hydraloop.hooks import DistSamplerSeedHook
from hydraloop.tasks.task import Task
from tests.helpers import EngineWithNeededHooks, differences
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
        super().__init__(data(), batch_size=SIZE, generator=torch.Generator().manual_seed(4))
        self.order: list[int] = []
        self.yielded = 0
        self.loaded: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        state, self.loaded = self.loaded, None
        torch.rand(())  # torch's loaders draw a seed for their workers
        self.order, self.yielded = ([], 0) if state is None else (state["order"], state["yielded"])
        if state is None:
            self.order = torch.randperm(40, generator=self.generator).tolist()
        return self._batches()

    def _batches(self) -> Iterator[Any]:
        while self.yielded < BATCHES:
            begin = self.yielded * SIZE
            self.yielded += 1
            yield self.collate_fn([data()[index] for index in self.order[begin : begin + SIZE]])

    def state_dict(self) -> dict[str, Any]:
        """The position of the last batch that was yielded."""
        assert self.generator is not None
        return {"order": self.order, "yielded": self.yielded, "generator": self.generator.get_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the position of the next iteration."""
        assert self.generator is not None
        self.generator.set_state(state["generator"])
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


LOADERS: dict[str, Callable[[], Any]] = {
    "shuffle": lambda: loader(shuffle=True),
    "shuffle, workers": lambda: loader(shuffle=True, num_workers=2),
    "shuffle, persistent workers": lambda: loader(shuffle=True, num_workers=1, persistent_workers=True),
    "own generator": lambda: loader(shuffle=True, generator=torch.Generator().manual_seed(4)),
    "own generators": lambda: loader(
        sampler=RandomSampler(range(40), generator=torch.Generator()), generator=torch.Generator(), num_workers=1
    ),
    "with replacement": lambda: loader(sampler=RandomSampler(range(40), replacement=True)),
    "weighted": lambda: loader(sampler=WeightedRandomSampler([1.0, 2.0] * 20, 40)),
    "subset": lambda: loader(sampler=SubsetRandomSampler(range(40))),
    "in order": loader,
    "in order, workers": lambda: loader(num_workers=1),
    "batch sampler": lambda: DataLoader(data(), batch_sampler=BatchSampler(RandomSampler(range(40)), SIZE, False)),
    "distributed": lambda: loader(sampler=DistributedSampler(data(), num_replicas=1, rank=0)),
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
    engine = EngineWithNeededHooks(
        task=Dropping(model, None),  # type: ignore[arg-type]
        optimizer=torch.optim.SGD(model.parameters(), lr=0.001, momentum=0.9),
        loaders=Loaders(train),
        hooks={"sampler_seed": DistSamplerSeedHook(), "watch": watch},
        settings=Settings(device="cpu", max_epochs=3, accumulate=2, test=False, **settings),
        run_dir=folder,
        distributed=distributed,
    )
    engine.train()
    return watch.samples, {name: value.clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("name", LOADERS)
def test_a_run_that_is_cut_again_and_again_sees_each_sample_as_one_that_is_not(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    whole, weights = run(tmp_path, LOADERS[name]())
    assert all(value.isfinite().all() for value in weights.values())
    assert len(whole) == 3 * BATCHES
    if name not in ("with replacement", "weighted"):
        epochs = [sum(whole[begin : begin + BATCHES], []) for begin in range(0, 3 * BATCHES, BATCHES)]  # noqa: RUF017
        assert all(sorted(epoch) == list(range(40)) for epoch in epochs)
    # Twice inside an epoch, at its end, inside the next one, and at the end of training.
    found, options = list[list[float]](), dict[str, Any]()
    for cut in (4, 8, 10, 16, 30):
        part, resumed = run(tmp_path, LOADERS[name](), save_at=cut, **options)
        found += part
        assert found == whole[:cut]
        options = {"resume": tmp_path / "checkpoints" / "cut.pth"}
    differs = "persistent" in name  # these workers are seeded once, so their noise differs
    assert (list(differences(resumed, weights)) != []) == differs
    assert ("persistent workers draw other random numbers" in caplog.text) == differs


def test_40_of_40_samples_after_a_cut_at_any_batch(tmp_path: Path) -> None:
    for first in range(2, 3 * BATCHES, 2):
        seen, _ = run(tmp_path, loader(shuffle=True), save_at=first)
        rest, _ = run(tmp_path, loader(shuffle=True), resume=tmp_path / "checkpoints" / "cut.pth")
        batches = [*seen, *rest]
        for begin in range(0, 3 * BATCHES, BATCHES):
            assert len({sample for batch in batches[begin : begin + BATCHES] for sample in batch}) == 40


def test_an_order_that_may_be_another_is_refused_inside_an_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cut = tmp_path / "checkpoints" / "cut.pth"
    run(tmp_path, loader(sampler=Custom()), save_at=14)
    with pytest.raises(UserError, match="DataLoader with Custom cannot continue inside an epoch") as caught:
        run(tmp_path, loader(sampler=Custom()), resume=cut)
    assert caught.value.key == "data.train"
    assert "resume_strict=false" in str(caught.value)
    with caplog.at_level(logging.WARNING):
        rest, _ = run(tmp_path, loader(sampler=Custom()), resume=cut, resume_strict=False)
    assert len(rest) == 16
    assert "the batches differ from those of the saved run" in caplog.text
    run(tmp_path, loader(sampler=Custom()), save_at=10)
    assert len(run(tmp_path, loader(sampler=Custom()), resume=cut)[0]) == 20


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
    with pytest.raises(UserError, match="inside an epoch whose samples had another order") as caught:
        run(tmp_path, ordered(**now), resume=cut)
    assert caught.value.key == "data.train"
    rest, _ = run(tmp_path, ordered(**now), resume=cut, resume_strict=False)
    assert len(rest) == 16
    assert "the batches differ from those of the saved run" in caplog.text
    run(tmp_path, ordered(**before), save_at=10)
    assert len(run(tmp_path, ordered(**now), resume=cut)[0]) == 20


def test_a_checkpoint_without_the_generators_is_refused_inside_an_epoch(tmp_path: Path) -> None:
    cut = tmp_path / "checkpoints" / "cut.pth"
    for shuffled in (loader(shuffle=True), Stateful()):
        run(tmp_path, loader(), save_at=14)  # as another loader, or an earlier version, has saved it
        checkpoint = torch.load(cut, weights_only=True)
        del checkpoint["data"]
        torch.save(checkpoint, cut)
        with pytest.raises(UserError, match="the checkpoint does not have its state"):
            run(tmp_path, shuffled, resume=cut)
        assert len(run(tmp_path, loader(), resume=cut)[0]) == 16, "an order that does not change needs no state"


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
