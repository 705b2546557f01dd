"""The order of an epoch, and loaders that do not use the global random state."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from hydraloop.data import EpochSampler, InMemoryDataset, build_loader
from hydraloop.data.map_style_loader import GlobalBatchLoader
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
