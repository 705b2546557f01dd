"""The order of an epoch, its shares and its draws: from (seed, epoch, batch, rank), not from the global state."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset

from hydraloop.data import EpochSampler, GlobalBatchLoader, InMemoryDataset, build_loader
from hydraloop.engine.loaders import Ordered
from hydraloop.engine.seeding import mix_seed
from hydraloop.errors import UserError


def numbers(count: int = 10) -> InMemoryDataset:
    return InMemoryDataset(torch.arange(count, dtype=torch.float32).view(-1, 1), torch.arange(count))


def order(sampler: EpochSampler, epoch: int) -> list[int]:
    """The indices of an epoch."""
    return [index for batch_idx in range(len(sampler)) for index in sampler.request(batch_idx, epoch).indices]


class Noisy(Dataset[Tensor]):
    """Draws a random number for each sample."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(())


def test_a_batch_is_indexed_at_once() -> None:
    inputs, targets = numbers().__getitems__([7, 0, 7])
    assert inputs.tolist() == [[7.0], [0.0], [7.0]]
    assert targets.tolist() == [7, 0, 7]
    one_input, one_target = numbers()[3]
    assert (one_input.tolist(), one_target.item()) == ([3.0], 3)


def test_a_batch_is_a_copy() -> None:
    data = numbers()
    data.__getitems__([0])[0].fill_(99)
    assert data.inputs[0].item() == 0


def test_inputs_and_targets_must_have_the_same_length() -> None:
    with pytest.raises(ValueError, match="3 inputs, but 2 targets"):
        InMemoryDataset(torch.zeros(3), torch.zeros(2))


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    data = range(100)
    sampler = EpochSampler(data, shuffle=True, seed=5)
    first, second = order(sampler, 0), order(sampler, 1)
    assert sorted(first) == sorted(second) == list(data)
    assert first != second
    assert order(EpochSampler(data, shuffle=True, seed=5), 1) == second
    assert order(sampler, 0) == first
    assert order(EpochSampler(data, shuffle=True, seed=6), 0) != second, "seed + 1 must not be epoch + 1"


def test_without_shuffle_the_order_is_the_data_sets() -> None:
    assert order(EpochSampler(range(4), shuffle=False), 3) == [0, 1, 2, 3]


def test_mixed_seeds_differ_for_close_numbers() -> None:
    seeds = {mix_seed(seed, epoch) for seed in range(100) for epoch in range(100)}
    assert len(seeds) > 9990
    assert all(0 <= seed < 2**32 for seed in seeds)
    assert mix_seed(2**40) != mix_seed(0), "the high bits of a seed count"


def test_samples_are_stacked_and_stacked_batches_stay() -> None:
    plain = build_loader(Noisy(), shuffle=False, batch_size=3)
    assert [batch.shape[0] for batch in plain] == [3, 3, 2]
    part = build_loader(Subset(numbers(), [4, 6, 8]), shuffle=False, batch_size=2)
    assert [targets.tolist() for _, targets in part] == [[4, 6], [8]]
    listed = build_loader(Noisy(), shuffle=False, batch_size=3, collate_fn=len)
    assert list(listed) == [3, 3, 2]


def test_auto_pins_for_cuda_only() -> None:
    assert build_loader(numbers(), shuffle=False, device=torch.device("cuda"))._torch.pin_memory is True
    assert build_loader(numbers(), shuffle=False, device=torch.device("cpu"))._torch.pin_memory is False
    assert build_loader(numbers(), shuffle=False)._torch.pin_memory is False


def test_an_empty_data_set_names_its_key() -> None:
    with pytest.raises(UserError, match="empty") as caught:
        build_loader(numbers(0), shuffle=True, key="data.train")
    assert caught.value.key == "data.train"


# The samples of a batch in any epoch. --------------------------------------------------------------------------------


def ordered_loader(samples: int, *, shuffle: bool, rank: int, world_size: int) -> GlobalBatchLoader:
    data = TensorDataset(torch.arange(samples))
    return build_loader(data, shuffle=shuffle, seed=3, batch_size=4, rank=rank, world_size=world_size)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("samples", "world_size"), [(22, 1), (22, 2), (9, 2), (33, 3)])
def test_the_indices_are_those_that_the_loader_loads(samples: int, world_size: int, shuffle: bool) -> None:
    """On each rank, including a filler."""
    for rank in range(world_size):
        loader = ordered_loader(samples, shuffle=shuffle, rank=rank, world_size=world_size)
        assert isinstance(loader, Ordered)
        for epoch in range(3):
            loader.set_epoch(epoch)
            loaded = [batch[0].tolist() for batch in loader]
            loader.set_epoch(0)  # of another epoch than the one asked for
            assert [loader.indices_at(batch_idx, epoch) for batch_idx in range(len(loader))] == loaded


def test_indices_at_changes_nothing() -> None:
    loader = ordered_loader(22, shuffle=True, rank=0, world_size=1)
    loader.set_epoch(2)
    batches = loader.begin(2, 2)
    expected = [loader.indices_at(batch_idx, 2) for batch_idx in (2, 3, 4, 5)]
    loader.indices_at(0, 5)
    assert [batch[0].tolist() for batch in batches] == expected
    assert loader.epoch == 2


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


def numbers_of_ranks(samples: int) -> InMemoryDataset:
    return InMemoryDataset(torch.arange(samples, dtype=torch.float32).view(-1, 1), torch.arange(samples))


def loaders(samples: int, world_size: int, **options: Any) -> list[GlobalBatchLoader]:
    return [
        build_loader(numbers_of_ranks(samples), rank=rank, world_size=world_size, key="data.train", **options)
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


class NoisyNumbers(Dataset[Tensor]):
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


class InBatches(NoisyNumbers):
    """The same; each batch has one more draw."""

    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        """The samples of a batch."""
        return [self[index] + torch.rand(()) for index in indices]


def noisy_batch(samples: list[Tensor]) -> Tensor:
    """A collate function that draws."""
    return torch.stack(samples) + torch.rand(()) + np.random.rand()


def loader_of(data: Any = None, **options: Any) -> GlobalBatchLoader:
    return build_loader(
        NoisyNumbers() if data is None else data, **{"shuffle": True, "seed": 3, "batch_size": 2, **options}
    )


def batches(loader: GlobalBatchLoader, epoch: int, first: int = 0) -> list[Any]:
    loader.set_epoch(epoch)
    return [batch.tolist() for batch in loader.begin(first, 0)]


@pytest.mark.parametrize(
    ("data", "options"),
    [(NoisyNumbers(), {}), (InBatches(), {}), (NoisyNumbers(), {"collate_fn": noisy_batch})],
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
    data = ConcatDataset([NoisyNumbers(), NoisyNumbers()])
    loader = loader_of(data, num_workers=workers)
    for epoch in (0, 1, 5, 1):
        assert {sample[1] for batch in batches(loader, epoch) for sample in batch} == {epoch}
    loader.end_workers()


def test_the_data_set_of_an_evaluation_gets_no_epoch() -> None:
    """It may be a part of the training data, whose epoch would change."""
    data = NoisyNumbers()
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
