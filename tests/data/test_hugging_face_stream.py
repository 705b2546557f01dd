"""Streams of Hugging Face's `datasets`: states, shuffle buffers, shards, and the splits between ranks and workers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import pytest

from hydraloop.errors import UserError
from tests.data.streams import stream_loader
from tests.data.test_stream import cut_run, numbers_of, run, train_loader

pytestmark = pytest.mark.slow  # the usual tests do without the packages of the examples

SAMPLES = 61


@pytest.fixture(autouse=True)
def _collected() -> Iterator[None]:
    """Iterators of `datasets` are in reference cycles, and those of several sets have threads."""
    pytest.importorskip("datasets", reason="the package datasets is not installed")  # not while tests are collected
    yield
    gc.collect()


def plain(shards: int = 4, samples: int = SAMPLES) -> Any:
    """0 .. n - 1 in shards, through a batched `map`."""
    from datasets import Dataset

    stream = Dataset.from_dict({"x": list(range(samples))}).to_iterable_dataset(num_shards=shards)
    return stream.map(lambda rows: {"noise": [2 * x for x in rows["x"]]}, batched=True, batch_size=5)


def shuffled() -> Any:
    return plain().shuffle(seed=3, buffer_size=8)


def interleaved() -> Any:
    from datasets import interleave_datasets

    return interleave_datasets([plain(), plain(samples=30)], probabilities=[0.3, 0.7], seed=1)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("make", "skip"), [(plain, False), (interleaved, False), (shuffled, True)])
def test_a_run_that_was_cut_reads_what_a_whole_one_reads(make: Callable[[], Any], skip: bool, workers: int) -> None:
    options: dict[str, Any] = {"num_workers": workers, "skip_on_resume": skip}
    whole = cut_run(make, (), 50, **options)
    for cuts in ((5,), (4, 5, 13), (7, 21, 22, 44)):
        assert cut_run(make, cuts, 50, **options) == whole, cuts


@pytest.mark.parametrize(("world_size", "workers", "shards"), [(2, 0, 4), (2, 2, 4), (3, 0, 4), (2, 0, 1)])
def test_ranks_and_workers_together_read_each_sample_once(world_size: int, workers: int, shards: int) -> None:
    loaders = [
        stream_loader(
            plain(shards), train=False, steps_per_epoch=99, rank=rank, world_size=world_size, num_workers=workers
        )
        for rank in range(world_size)
    ]
    assert sorted(x for loader in loaders for batch in loader for x in numbers_of(batch)) == [*range(SAMPLES)]


@pytest.mark.parametrize("workers", [0, 2])
def test_each_pass_has_other_shards_first(workers: int) -> None:
    """Workers share the memory of the epoch: one that begins its next pass must not change it for the others."""
    loader = train_loader(plain(shards=8, samples=16), batch_size=4, num_workers=workers)
    passes = [list(chain(*(batch["x"] for batch in run(loader, at, at + 4)))) for at in (0, 4, 8)]
    loader.end_workers()
    assert [sorted(one) for one in passes] == [[*range(16)]] * 3
    assert passes[0] != passes[1] != passes[2] != passes[0]


def test_more_workers_than_shards_are_refused() -> None:
    loader = train_loader(plain(shards=1), num_workers=2)
    with pytest.raises(UserError, match=r"part . of 2 of the stream") as caught:
        run(loader, 0, 5)
    assert "store the data in more shards" in str(caught.value.remedy)
