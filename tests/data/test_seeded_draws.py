"""Draws of samples depend on (seed, epoch, sample), not on workers, prefetch or where an epoch begins."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from hydraloop.data import build_loader
from hydraloop.data.map_style_loader import MapStyleLoader
from hydraloop.data.random_state import mix_seed


class Noisy(Dataset[Tensor]):
    """Nine samples `[index, epoch, draws of three generators]`."""

    def __init__(self) -> None:
        self.epoch = -1

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> Tensor:
        drawn = [random.random(), float(np.random.randn()), float(torch.randn(()))]
        return torch.tensor([index, self.epoch, *drawn], dtype=torch.float64)

    def set_epoch(self, epoch: int) -> None:
        """Remember the epoch."""
        self.epoch = epoch


class InBatches(Noisy):
    """The same; each batch has one more draw."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        """The samples of a batch."""
        return [self[index] + torch.rand(()) for index in indices]


def noisy_batch(samples: list[Tensor]) -> Tensor:
    """A collate function that draws."""
    return torch.stack(samples) + torch.rand(()) + np.random.rand()


def loader_of(data: Any = None, **options: Any) -> MapStyleLoader:
    return build_loader(Noisy() if data is None else data, **{"shuffle": True, "seed": 3, "batch_size": 2, **options})


def batches(loader: MapStyleLoader, epoch: int, first: int = 0) -> list[Any]:
    loader.set_epoch(epoch)
    return [batch.tolist() for batch in loader.begin(first, 0)]


@pytest.mark.parametrize(
    ("data", "options"),
    [(Noisy(), {}), (InBatches(), {}), (Noisy(), {"collate_fn": noisy_batch})],
    ids=["samples", "batches", "collate"],
)
def test_draws_do_not_depend_on_workers_prefetch_or_the_first_batch(data: Any, options: dict[str, Any]) -> None:
    alone = loader_of(data, **options)
    expected = [batches(alone, epoch) for epoch in (0, 1)]
    assert [batches(alone, 1), batches(alone, 0)] == expected[::-1]
    assert len({draw for epoch in expected for batch in epoch for sample in batch for draw in sample[2:]}) == 9 * 2 * 3
    loader = loader_of(data, num_workers=2, prefetch_factor=4, **options)
    part = batches(loader, 0, 2)
    left = iter(loader)
    next(left)  # the rest is not consumed
    assert part == expected[0][2:]
    assert batches(loader, 1, 3) == expected[1][3:]
    loader.end_workers()
    assert batches(loader_of(data, num_workers=1, persistent_workers=False, **options), 1) == expected[1]


def test_draws_of_samples_do_not_depend_on_the_order_or_the_ranks() -> None:
    def by_sample(*loaders: MapStyleLoader) -> dict[float, list[float]]:
        return {sample[0]: sample for loader in loaders for batch in batches(loader, 4) for sample in batch}

    expected = by_sample(loader_of())
    assert by_sample(loader_of(shuffle=False, batch_size=5)) == expected
    assert by_sample(*(loader_of(rank=rank, world_size=3) for rank in range(3))) == expected
    assert by_sample(loader_of(Subset(Noisy(), range(9)))) == expected, "torch's Subset has __getitems__"
    assert by_sample(loader_of(seed=4)) != expected


def test_a_sample_that_is_drawn_again_has_other_draws() -> None:
    first, second = batches(loader_of(sampler=[5, 5], batch_size=1), 0)
    assert first[0][0] == second[0][0] == 5
    assert first != second


def test_ranks_whose_sampler_splits_an_epoch_have_different_draws() -> None:
    def drawn(rank: int) -> Any:
        sampler = partial(torch.utils.data.DistributedSampler, shuffle=False)
        data = Subset(InBatches(), [0] * 8)
        return batches(loader_of(data, sampler=sampler, rank=rank, world_size=2), 0)

    assert drawn(0) != drawn(1)
    assert drawn(1) == drawn(1)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_data_set_gets_the_epoch_where_it_is_loaded(workers: int) -> None:
    data = ConcatDataset([Noisy(), Noisy()])
    loader = loader_of(data, num_workers=workers)
    for epoch in (0, 1, 5, 1):
        assert {sample[1] for batch in batches(loader, epoch) for sample in batch} == {epoch}
    loader.end_workers()


def test_the_data_set_of_an_evaluation_gets_no_epoch() -> None:
    """It may be a part of the training data, whose epoch would change."""
    data = Noisy()
    data.set_epoch(7)
    loader = loader_of(data, shuffle=False)
    assert {sample[1] for batch in loader for sample in batch.tolist()} == {7}


@pytest.mark.parametrize("workers", [0, 1])
def test_the_generators_of_the_run_are_not_changed(workers: int) -> None:
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[union-attr]
    batches(loader_of(num_workers=workers, collate_fn=noisy_batch, persistent_workers=False), 0)
    assert random.getstate() == before[0]
    assert np.random.get_state()[1].tolist() == before[1]  # type: ignore[union-attr]
    assert torch.equal(torch.get_rng_state(), before[2])


class Thousand(Dataset[Tensor]):
    """A thousand samples `[index, draw]`, of which some draw. Remembers what it has loaded."""

    def __init__(self, draw: Callable[[int], float], first: int = 0) -> None:
        self.draw, self.first = draw, first
        self.loaded: list[int] = []

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Tensor:
        self.loaded.append(index)
        return torch.tensor([index, self.draw(index) if index >= self.first else 0.0], dtype=torch.float64)


def initial_seed(index: int) -> float:
    return float(torch.initial_seed())


def gauss(index: int) -> float:
    """Draw one number; the generator keeps the second one of a pair."""
    return random.gauss(0, 1)


def randn(index: int) -> float:
    """Draw one number; the generator keeps the second one of a pair."""
    return float(np.random.randn())


def one_of_many(index: int) -> float:
    """Draw in one of 200 samples, from another generator each time."""
    draws = (random.random, np.random.rand, lambda: float(torch.rand(())))
    return float(draws[index // 200 % 3]()) if index % 200 == 100 else -1.0 - index


def by_another(index: int) -> float:
    """Draw from Python's generator only for some draws of NumPy's."""
    return random.random() if np.random.rand() > 0.9 else -1.0 - index


def fails_for_some_draws(index: int) -> float:
    """Fail unless the draw is that of this epoch and sample, because a generator that is not seeded draws others."""
    drawn = random.random()
    if drawn != random.Random(mix_seed(3, 1, 5, index)).random():
        raise ValueError("an unlucky draw")
    return drawn


@pytest.mark.parametrize(
    "draw", [initial_seed, gauss, randn, one_of_many, by_another, fails_for_some_draws], ids=lambda draw: draw.__name__
)
def test_each_sample_has_its_own_draws_whatever_was_loaded_before(draw: Callable[[int], float]) -> None:
    """Generators are seeded only if samples draw from them, so what a process has loaded must make no difference."""
    alone = batches(loader_of(Thousand(draw), batch_size=1000), 1)[0]
    drawn = dict(sample for sample in alone)
    assert len({*drawn.values()}) == 1000
    for options in ({}, {"num_workers": 2, "persistent_workers": False}, {"sampler": None, "rank": 1, "world_size": 3}):
        loader = loader_of(Thousand(draw), **{"batch_size": 64, **options})
        for first in (0, 3):
            found = [tuple(sample) for batch in batches(loader, 1, first) for sample in batch]
            assert found == [(index, drawn[index]) for index, _ in found]
            assert len(found) > 100


@pytest.mark.parametrize(("draw", "twice"), [(float, 0), (lambda _: float(torch.rand(())), 0), (one_of_many, 2)])
def test_only_the_first_batch_that_draws_is_loaded_twice(draw: Callable[[int], float], twice: int) -> None:
    """Python's generator draws first in batch 10, NumPy's in batch 30."""
    data = Thousand(draw)
    loader = loader_of(data, shuffle=False, batch_size=10)
    for _ in range(3):
        batches(loader, 0)
    again = [index for index in range(1000) if data.loaded.count(index) > 3]
    assert again == [*range(100, 110), *range(300, 310)][: 10 * twice]


def test_a_loader_of_data_without_draws_changes_no_generator_of_the_run() -> None:
    """Noticing a draw must not itself draw."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    expected = random.random(), np.random.rand(), float(torch.rand(()))
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(5)
    batches(loader_of(Thousand(float)), 0)
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == expected
