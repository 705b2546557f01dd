"""`indices_at`: the samples of a batch in any epoch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from hydraloop.data.loader import Loader, build_loader
from hydraloop.engine.loaders import Ordered


def _loader(samples: int, *, shuffle: bool, rank: int, world_size: int) -> Loader:
    data = TensorDataset(torch.arange(samples))
    return build_loader(data, shuffle=shuffle, seed=3, batch_size=4, rank=rank, world_size=world_size)


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("samples", "world_size"), [(22, 1), (22, 2), (9, 2), (33, 3)])
def test_the_indices_are_those_that_the_loader_loads(samples: int, world_size: int, shuffle: bool) -> None:
    """On each rank, including a filler."""
    for rank in range(world_size):
        loader = _loader(samples, shuffle=shuffle, rank=rank, world_size=world_size)
        assert isinstance(loader, Ordered)
        for epoch in range(3):
            loader.set_epoch(epoch)
            loaded = [batch[0].tolist() for batch in loader]
            loader.set_epoch(0)  # of another epoch than the one asked for
            assert [loader.indices_at(batch_idx, epoch) for batch_idx in range(len(loader))] == loaded


def test_indices_at_changes_nothing() -> None:
    loader = _loader(22, shuffle=True, rank=0, world_size=1)
    loader.set_epoch(2)
    batches = loader.begin(2, 2)
    expected = [loader.indices_at(batch_idx, 2) for batch_idx in (2, 3, 4, 5)]
    loader.indices_at(0, 5)
    assert [batch[0].tolist() for batch in batches] == expected
    assert loader.epoch == 2


@pytest.mark.parametrize("batch_idx", [-1, 6])
def test_there_is_no_such_batch(batch_idx: int) -> None:
    with pytest.raises(IndexError, match=f"no batch {batch_idx}"):
        _loader(22, shuffle=True, rank=0, world_size=1).indices_at(batch_idx, 0)
