"""One epoch on several ranks: every sample once, the batches of one process, equally many batches on each rank."""

from __future__ import annotations

from itertools import chain
from typing import Any

import pytest
import torch

from hydraloop.data import EpochSampler, GlobalBatchLoader, InMemoryDataset, build_loader
from hydraloop.errors import UserError

WORLDS = range(1, 6)


def samplers(samples: int, batch_size: int, world_size: int, **options: Any) -> list[EpochSampler]:
    return [
        EpochSampler(range(samples), batch_size=batch_size, rank=rank, world_size=world_size, seed=3, **options)
        for rank in range(world_size)
    ]


def batches_of(sampler: EpochSampler) -> list[list[int]]:
    return [request.indices for request in sampler]


def flat(sampler: EpochSampler) -> list[int]:
    return [*chain.from_iterable(batches_of(sampler))]


def counted(sampler: EpochSampler, batches: list[list[int]]) -> list[list[int]]:
    """The samples of each batch that count: all, or none of a filler."""
    return [batch[: sampler.samples_at(batch_idx)[0]] for batch_idx, batch in enumerate(batches)]


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("world_size", WORLDS)
def test_ranks_together_see_the_batches_of_one_process(shuffle: bool, drop_last: bool, world_size: int) -> None:
    for samples in range(1, 41):
        for batch_size in range(1, 8):
            case = f"{samples} samples, batches of {batch_size}"
            ranks = samplers(samples, batch_size, world_size, shuffle=shuffle, drop_last=drop_last)
            (single,) = samplers(samples, batch_size * world_size, 1, shuffle=shuffle, drop_last=drop_last)
            expected = batches_of(single)
            batches = [batches_of(rank) for rank in ranks]
            assert {len(of_rank) for of_rank in batches} == {len(rank) for rank in ranks} == {len(expected)}, case
            assert all(batch for of_rank in batches for batch in of_rank), case
            shares = [counted(rank, of_rank) for rank, of_rank in zip(ranks, batches, strict=True)]
            together = [list(chain.from_iterable(parts)) for parts in zip(*shares, strict=True)]
            assert together == expected, case
            once = set(chain.from_iterable(together))
            dropped = samples % (batch_size * world_size) if drop_last else 0
            assert len(once) == sum(map(len, together)) == samples - dropped, case


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_position_skips_the_same_batches_on_every_rank(shuffle: bool, world_size: int) -> None:
    for samples, batch_size in ((1, 3), (17, 2), (23, 4), (40, 7)):
        for rank in samplers(samples, batch_size, world_size, shuffle=shuffle):
            whole = list(rank)
            for position in range(len(whole) + 1):
                rank.first = position
                assert list(rank) == whole[position:]


def test_a_request_takes_the_same_time_anywhere_in_an_epoch() -> None:
    sampler = EpochSampler(range(2**40), shuffle=False, batch_size=64)
    assert sampler.request(10**9, 0) == ([*range(64 * 10**9, 64 * 10**9 + 64)], 0, 10**9)


def test_the_shares_of_a_short_global_batch_are_even_and_contiguous() -> None:
    ranks = samplers(15, 4, 3, shuffle=False)
    assert [flat(rank) for rank in ranks] == [[0, 1, 2, 3, 12], [4, 5, 6, 7, 13], [8, 9, 10, 11, 14]]
    assert [flat(rank) for rank in samplers(5, 4, 3, shuffle=False)] == [[0, 1], [2, 3], [4]]


def test_a_rank_without_samples_has_a_filler_that_does_not_count() -> None:
    ranks = samplers(14, 4, 3, shuffle=False)
    assert [flat(rank)[4:] for rank in ranks] == [[12], [13], [12, 13]]
    assert [rank.samples_at(1) for rank in ranks] == [(1, 2), (1, 2), (0, 2)]
    assert [rank.samples_at(0) for rank in ranks] == [(4, 12)] * 3


def test_a_filler_has_two_samples_if_batches_have() -> None:
    assert [flat(rank) for rank in samplers(1, 4, 3, shuffle=False)] == [[0], [0, 0], [0, 0]]
    assert [flat(rank) for rank in samplers(4, 1, 3, shuffle=False)] == [[0, 3], [1, 3], [2, 3]]
    assert [len(flat(rank)) for rank in samplers(1, 4, 3, shuffle=False)] == [1, 2, 2]


def test_in_one_process_the_order_does_not_depend_on_the_batch_size() -> None:
    orders = {tuple(flat(EpochSampler(range(50), shuffle=True, seed=1, batch_size=size))) for size in (1, 4, 7, 50, 64)}
    assert len(orders) == 1


# Loaders. ------------------------------------------------------------------------------------------------------------


def numbers(samples: int) -> InMemoryDataset:
    return InMemoryDataset(torch.arange(samples, dtype=torch.float32).view(-1, 1), torch.arange(samples))


def loaders(samples: int, world_size: int, **options: Any) -> list[GlobalBatchLoader]:
    return [
        build_loader(numbers(samples), rank=rank, world_size=world_size, key="data.train", **options)
        for rank in range(world_size)
    ]


@pytest.mark.parametrize("shuffle", [True, False])
def test_fewer_samples_than_processes_are_refused(shuffle: bool) -> None:
    with pytest.raises(UserError, match="3 samples cannot be shared by 4 processes") as caught:
        loaders(3, 4, shuffle=shuffle)
    assert caught.value.key == "data.train"


def test_drop_last_needs_a_batch_for_each_process() -> None:
    with pytest.raises(UserError, match="11 samples are less than a batch of 12") as caught:
        loaders(11, 3, shuffle=True, batch_size=4, drop_last=True)
    assert caught.value.key == "data.train"
    assert caught.value.remedy == "Use data.loader.batch_size=3 or less, or data.loader.drop_last=false."
