"""Samplers and batch samplers: seeded by (seed, epoch), shared by the ranks, exact after a resume."""

from __future__ import annotations

import functools
import random
import re
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, DistributedSampler, RandomSampler, Sampler, WeightedRandomSampler

from hydraloop.data import build_loader
from hydraloop.data.map_style_loader import GlobalBatchLoader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import share_of
from hydraloop.errors import UserError
from tests.data.loader_parts import ByLength, Words, pad
from tests.helpers import Recorder, make_engine
from tests.ranks import on_ranks

OF_TWO: Any = DistributedSampler(Words(), num_replicas=2, rank=1)
WEIGHTED = WeightedRandomSampler([1.0] * 20 + [5.0] * 20, num_samples=30)


class Everywhere(Sampler[int]):
    """Draws from all generators: torch's, NumPy's, Python's and its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator()

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[int]:
        yield from torch.randint(40, (4,)).tolist()
        yield from np.random.randint(40, size=4)
        yield from (random.randrange(40) for _ in range(4))
        yield from torch.randint(40, (4,), generator=self.generator)


SAMPLERS: dict[str, Any] = {
    "weighted": WEIGHTED,
    "class": partial(RandomSampler, num_samples=30),
    "all generators": Everywhere(),
    "own generator": RandomSampler(range(40), generator=torch.Generator()),
}
BATCH_SAMPLERS: dict[str, Any] = {
    "by length": partial(ByLength, batch_size=4),
    "torch's": BatchSampler(WEIGHTED, 7, drop_last=False),
}


def of_rank(which: str, name: str, rank: int = 0, world_size: int = 1, batch_size: int = 4, **options: Any) -> Any:
    sampler = (SAMPLERS if which == "sampler" else BATCH_SAMPLERS)[name]
    part = {"rank": rank, "world_size": world_size, which: sampler}
    return build_loader(Words(), shuffle=True, seed=3, batch_size=batch_size, collate_fn=pad, **part, **options)  # type: ignore[arg-type]


def samples_of(loader: GlobalBatchLoader, epoch: int) -> list[list[int]]:
    """The samples of each batch of an epoch that count, as they were loaded."""
    loader.set_epoch(epoch)
    share = share_of(loader)
    batches: list[list[int]] = [batch[:, 0].tolist() for batch in loader]
    return [batch[: share(number)[0]] if share else batch for number, batch in enumerate(batches)]


CASES = [("sampler", name) for name in SAMPLERS] + [("batch_sampler", name) for name in BATCH_SAMPLERS]


@pytest.mark.parametrize(("which", "name"), CASES)
def test_an_order_follows_from_seed_and_epoch_and_draws_from_no_generator_of_the_run(which: str, name: str) -> None:
    before = random.getstate(), torch.get_rng_state(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    epochs = [samples_of(of_rank(which, name), epoch) for epoch in (0, 1)]
    assert before[0] == random.getstate()
    assert torch.equal(before[1], torch.get_rng_state())
    assert before[2] == np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    assert epochs[0] != epochs[1]
    torch.manual_seed(11)
    random.seed(11)
    again = of_rank(which, name)
    assert [samples_of(again, epoch) for epoch in (1, 0)] == epochs[::-1]


@pytest.mark.parametrize("world_size", range(1, 6))
@pytest.mark.parametrize(("which", "name"), CASES)
def test_ranks_share_an_order(which: str, name: str, world_size: int) -> None:
    whole = samples_of(of_rank(which, name, batch_size=4 * world_size), 2)
    ranks = [of_rank(which, name, rank, world_size) for rank in range(world_size)]
    parts = [samples_of(rank, 2) for rank in ranks]
    assert len({len(part) for part in parts}) == 1
    assert len({len(rank) for rank in ranks}) == 1
    together = [list(chain.from_iterable(of_ranks)) for of_ranks in zip(*parts, strict=True)]
    groups = whole
    if which == "batch_sampler":
        groups = [list(chain(*whole[begin : begin + world_size])) for begin in range(0, len(whole), world_size)]
    assert together == groups
    assert [rank.samples_at(batch_idx)[1] for rank in ranks for batch_idx in range(len(rank))] == [
        len(group) for _ in ranks for group in groups
    ]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize(("which", "name"), [("sampler", "weighted"), ("batch_sampler", "by length")])
def test_an_epoch_continues_at_any_batch(which: str, name: str, workers: int) -> None:
    for rank in (0, 1):
        loader = of_rank(which, name, rank, 2, num_workers=workers)
        loader.set_epoch(1)
        whole = [batch[:, 0].tolist() for batch in loader]
        assert [loader.indices_at(number, 1) for number in range(len(loader))] == whole
        for first in (0, 2, len(loader)):
            fresh = of_rank(which, name, rank, 2, num_workers=workers)
            fresh.set_epoch(1)
            assert [batch[:, 0].tolist() for batch in fresh.begin(first, 99)] == whole[first:]
        with pytest.raises(IndexError, match="no batch"):
            loader.samples_at(len(loader))
        with pytest.raises(IndexError, match="no batch"):
            loader.indices_at(len(loader), 1)


def test_a_filler_has_two_samples_of_the_last_group() -> None:
    for count, filler in ((9, [6, 7]), (7, [6, 6])):
        batches = [list(range(begin, min(begin + 3, count))) for begin in range(0, count, 3)]
        loader = build_loader(Words(), shuffle=True, batch_sampler=batches, rank=1, world_size=2, collate_fn=pad)
        assert [batch[:, 0].tolist() for batch in loader] == [[3, 4, 5], filler]
        assert isinstance(loader, GlobalBatchLoader)
        assert [loader.samples_at(number) for number in (0, 1)] == [(3, 6), (0, count - 6)]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sampler": []}, "0 samples cannot be shared"),
        ({"sampler": [0], "batch_sampler": [[1]]}, "there is a batch_sampler too"),
        ({"sampler": OF_TWO}, "DistributedSampler splits an epoch between processes"),
        ({"batch_sampler": BatchSampler(OF_TWO, 4, drop_last=False)}, "BatchSampler splits an epoch"),
    ],
)
def test_what_has_no_order_is_refused_when_built(options: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        build_loader(Words(), shuffle=True, **options)


def _drawn_on(distributed: Distributed, which: str, name: str) -> list[list[int]]:
    random.seed(distributed.rank)
    torch.manual_seed(distributed.rank)
    return samples_of(of_rank(which, name, distributed.rank, distributed.world_size), 1)


@pytest.mark.parametrize(("which", "name"), [("sampler", "all generators"), ("batch_sampler", "by length")])
def test_ranks_with_different_generators_draw_the_same_order(which: str, name: str) -> None:
    parts = on_ranks(2, _drawn_on, which, name)
    assert parts == [samples_of(of_rank(which, name, rank, 2), 1) for rank in range(2)]


def test_samples_of_a_list_are_batched() -> None:
    data: Any = [torch.tensor(number) for number in range(5)]
    batches: list[Tensor] = list(build_loader(data, shuffle=False, batch_size=2))
    assert [batch.tolist() for batch in batches] == [[0, 1], [2, 3], [4]]


class Entries(Dataset[dict[str, int]]):
    """Dicts, one of them without a label."""

    def __init__(self, broken: int | None = None) -> None:
        self.broken = broken

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> dict[str, int]:
        return {"text": index} if index == self.broken else {"text": index, "label": 1}


class Failing(Words):
    """A data set that fails, or ends its process, at a sample."""

    def __init__(self, fail: Callable[[], object]) -> None:
        super().__init__()
        self.fail = fail

    def __getitem__(self, index: int) -> list[int]:
        if index == 17:
            self.fail()
        return super().__getitem__(index)


def labels(samples: list[dict[str, int]], *, scale: int = 1) -> Tensor:
    """Collates one entry."""
    return torch.tensor([sample["label"] * scale for sample in samples])


def no_file() -> None:
    raise OSError("no file")


def first_error(data: Any, first: int = 0, **options: Any) -> BaseException:
    loader = build_loader(data, shuffle=True, seed=1, batch_size=4, key="data.train", **options)
    loader.set_epoch(1)
    with pytest.raises(Exception) as caught:  # noqa: PT011  # of several types
        list(loader.begin(first, first))
    loader.end_workers()  # torch waits 5 s for each worker whose iterator is collected as a part of a cycle
    return caught.value


@pytest.mark.parametrize("workers", [0, 2])
def test_the_samples_that_cannot_be_collated_are_named(workers: int) -> None:
    # The order of epoch 1: the position tells which batch has the sample.
    loader = build_loader(Entries(), shuffle=True, seed=1, batch_size=4)
    first = next(number for number in range(5) if 13 in loader.indices_at(number, 1))
    keys = {name: f"data.val_loader.{name}" for name in ("batch_size", "sampler", "batch_sampler", "collate_fn")}
    for begin in (0, first):
        collate = functools.partial(labels, scale=2)
        error = first_error(Entries(13), begin, collate_fn=collate, num_workers=workers, keys=keys)
        assert isinstance(error, UserError)
        assert error.key == "data.val_loader.collate_fn"
        samples = loader.indices_at(first, 1)
        assert error.problem == f"labels fails for the samples {samples} of data.train: KeyError: 'label'"
        assert "in labels" in "".join(traceback.format_exception(error)), "the log has the user's line"


@pytest.mark.parametrize("workers", [0, 1])
def test_an_error_of_the_data_set_stays_and_names_the_samples(workers: int) -> None:
    error = first_error(Failing(no_file), collate_fn=pad, num_workers=workers)
    assert isinstance(error, OSError)
    text = "".join(traceback.format_exception(error))
    assert re.search(r"data\.train: samples \[.*\b17\b.*\], in epoch 2", text)


def test_a_validation_that_cannot_be_collated_ends_the_run_before_it_begins(tmp_path: Path) -> None:
    val: Any = build_loader(Entries(3), shuffle=False, batch_size=4, key="data.val", collate_fn=labels)
    seen = Recorder()
    with pytest.raises(UserError, match=r"labels fails for the samples \[0, 1, 2, 3\] of data\.val") as caught:
        make_engine(tmp_path, {"seen": seen}, val=val, sanity_val_steps=2).train()
    assert caught.value.key == "data.loader.collate_fn"
    assert "before_train_iter 0" not in seen.trace
