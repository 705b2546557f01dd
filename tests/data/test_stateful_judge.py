"""What torchdata's public tests ask of a stateful loader, asked of the loaders here.

The cases are those of `test/stateful_dataloader/test_state_dict.py` in github.com/pytorch/data (BSD 3-clause), in code
of our own: a state inside an epoch, at its end and before its first batch, several epochs, a second and third resume, a
request for a state between any two batches, states as JSON, another number of workers, a data set with its own state.

Left out: `snapshot_every_n_steps` and the cost of skipping, because states here are positions and nothing is skipped;
`state_dict` of samplers, because orders follow from (seed, epoch); and states of a loader without a batch size.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import islice, product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset

from hydraloop.data import build_loader
from hydraloop.errors import UserError
from tests.data.streams import Shards, stream_loader
from tests.marks import nightly, slow


class Noisy(Dataset[Tensor]):
    """22 samples `[index, draws]`."""

    def __len__(self) -> int:
        return 22

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index, random.random(), float(torch.rand(()))], dtype=torch.float64)


class Stateful:
    """A `TrainLoader` as torchdata's `StatefulDataLoader`: each iteration is an epoch, or the rest of one."""

    def __init__(self, kind: str, workers: int) -> None:
        self.loader: Any = (
            build_loader(Noisy(), shuffle=True, seed=3, batch_size=3, num_workers=workers)
            if kind == "indices"
            else stream_loader(Shards(), train=True, seed=3, batch_size=3, steps_per_epoch=8, num_workers=workers)
        )
        self.at = {"epoch": 0, "first": 0, "iteration": 0}

    def __iter__(self) -> Iterator[Any]:
        if hasattr(self.loader, "set_epoch"):
            self.loader.set_epoch(self.at["epoch"])
        for batch in self.loader.begin(self.at["first"], self.at["iteration"]):
            self.at["first"] += 1
            self.at["iteration"] += 1
            yield batch["x"].tolist() if isinstance(batch, dict) else batch.tolist()
        self.at = {**self.at, "epoch": self.at["epoch"] + 1, "first": 0}

    def state_dict(self) -> str:
        """As JSON."""
        return json.dumps([self.at, self.loader.state_at(self.at["first"], self.at["iteration"])])

    def load_state_dict(self, state: str) -> None:
        """Continue there."""
        self.at, of_loader = json.loads(state)
        self.loader.load_state(of_loader, self.at["first"], self.at["iteration"])


EPOCHS, BATCHES = 3, 8


def rest_of(loader: Stateful) -> list[Any]:
    """The batches until the end of the last epoch."""
    found = []
    while loader.at["epoch"] < EPOCHS:
        found += list(loader)
    loader.loader.end_workers()
    return found


def resumed(kind: str, workers: int, state: str) -> Stateful:
    loader = Stateful(kind, workers)
    loader.load_state_dict(state)
    return loader


_USUAL = {("indices", 2, 10), ("stream", 2, 10), ("indices", 0, 8), ("stream", 0, 8), ("stream", 0, 0)}
CASES = [
    case if case in _USUAL else nightly(*case)
    for case in product(("indices", "stream"), (0, 1, 2), (0, 1, 7, 8, 10, 16, 23))
]


@pytest.mark.parametrize(("kind", "workers", "cut"), CASES)
def test_a_loader_with_the_state_yields_the_rest(kind: str, workers: int, cut: int) -> None:
    expected = rest_of(Stateful(kind, workers))
    assert len(expected) == EPOCHS * BATCHES
    loader, found = Stateful(kind, workers), []
    while len(found) < cut:
        found += list(islice(loader, min(cut - len(found), BATCHES + 1)))
    state = loader.state_dict()
    loader.loader.end_workers()
    assert found + rest_of(resumed(kind, workers, state)) == expected


@pytest.mark.parametrize(("kind", "workers"), [("indices", 0), ("stream", 0), slow("stream", 2)])
def test_a_state_between_any_two_batches_and_resumes_of_resumes(kind: str, workers: int) -> None:
    expected = rest_of(Stateful(kind, workers))
    found: list[Any] = []
    loader = Stateful(kind, workers)
    while len(found) < len(expected):
        states = []
        for batch in islice(loader, 5):
            found.append(batch)
            states.append(loader.state_dict())
        if states:
            loader.loader.end_workers()
            loader = resumed(kind, workers, states[-1])
    assert found == expected


def test_another_number_of_workers_changes_nothing_or_is_refused() -> None:
    loader = Stateful("indices", 0)
    expected = list(loader)
    loader = Stateful("indices", 0)
    assert [*islice(loader, 3), *islice(resumed("indices", 1, loader.state_dict()), 5)] == expected
    stream = Stateful("stream", 0)
    next(iter(stream))
    with pytest.raises(UserError, match=r"data\.loader\.num_workers"):
        resumed("stream", 2, stream.state_dict())
