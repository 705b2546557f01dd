"""Draws depend on (seed, epoch, batch, rank), not on workers, prefetch or where an epoch begins."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset

from hydraloop.data import build_loader
from hydraloop.data.map_style_loader import GlobalBatchLoader


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


def loader_of(data: Any = None, **options: Any) -> GlobalBatchLoader:
    return build_loader(Noisy() if data is None else data, **{"shuffle": True, "seed": 3, "batch_size": 2, **options})


def batches(loader: GlobalBatchLoader, epoch: int, first: int = 0) -> list[Any]:
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


def test_draws_differ_between_seeds_ranks_and_batches() -> None:
    def drawn(**options: Any) -> Any:
        return batches(loader_of(Subset(InBatches(), [0] * 8), shuffle=False, **options), 0)

    ranks = [drawn(rank=rank, world_size=2, batch_size=1) for rank in range(2)]
    for of_case in (ranks, [drawn(), drawn(seed=4)]):
        samples = [tuple(sample) for part in of_case for batch in part for sample in batch]
        assert len({*samples}) == len(samples)
    assert drawn() == drawn()


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
