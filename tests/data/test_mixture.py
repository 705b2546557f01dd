"""Training on several sets: how many samples of each are in an epoch, and streams that are mixed by weights."""

from __future__ import annotations

from collections import Counter
from itertools import chain
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from hydraloop.data.mixture import MixtureSampler, join_sets, mix_streams
from hydraloop.errors import UserError
from tests.data.streams import Numbers, Plain, Shards
from tests.data.test_stream import cut_run, run, train_loader


def sets(**lengths: int) -> dict[str, Any]:
    return {name: TensorDataset(torch.arange(length)) for name, length in lengths.items()}


def counts(order: MixtureSampler) -> list[int]:
    """The indices of each of the sets that an epoch has."""
    ends = torch.tensor(order.sizes).cumsum(0).tolist()
    found = [sum(index < end for index in order) for end in ends]
    return [later - earlier for earlier, later in zip([0, *found], found, strict=False)]


def test_without_weights_an_epoch_has_each_sample_once() -> None:
    joined, order = join_sets(sets(a=5, b=3), {}, {})
    assert order is None
    assert [joined[index][0].item() for index in range(len(joined))] == [0, 1, 2, 3, 4, 0, 1, 2]


def test_weights_are_the_shares_of_an_epoch_as_long_as_all_sets() -> None:
    _, order = join_sets(sets(a=90, b=10), {"a": 1, "b": 3}, {})
    assert order is not None
    assert counts(order) == [25, 75]
    of_each = Counter(order)
    assert {of_each[index] for index in range(90)} <= {0, 1}, "a part of the larger set, no sample twice"
    assert sorted({of_each[index] for index in range(90, 100)}) == [7, 8], "the smaller set 7 times, and half of it"


def test_lengths_are_the_samples_of_a_set() -> None:
    _, order = join_sets(sets(a=20, b=10, c=4), {}, {"a": 5, "c": 9})
    assert order is not None
    assert (len(order), counts(order)) == (24, [5, 10, 9])


@pytest.mark.parametrize(
    ("weights", "lengths", "message", "remedy"),
    [
        ({"a": 1}, {}, "data.weights: b has no weight", "Add one: b: 1."),
        ({"a": 1, "c": 1}, {}, "data.weights.c: there is no such set in data.train", "Known: a, b."),
        ({}, {"bb": 3}, "data.lengths.bb: there is no such set in data.train", "Did you mean b?"),
        ({}, {"a": 0}, "data.lengths.a: cannot be 0", "Use a positive number."),
        ({}, {"a": 1.5}, "data.lengths.a: cannot be 1.5", "Use a positive number."),
        ({"a": float("nan"), "b": 1}, {}, "data.weights.a: cannot be nan", "Use a positive number."),
        ({"a": 1, "b": float("inf")}, {}, "data.weights.b: cannot be inf", "Use a positive number."),
        ({"a": True, "b": 1}, {}, "data.weights.a: cannot be True", "Use a positive number."),
        ({"a": "much", "b": 1}, {}, "data.weights.a: cannot be 'much'", "Use a positive number."),
        ({"a": 1, "b": 1}, {"a": 1}, "data.weights: there are data.lengths too", "Leave one of the two out."),
    ],
)
def test_mistakes(weights: Any, lengths: Any, message: str, remedy: str) -> None:
    with pytest.raises(UserError) as caught:
        join_sets(sets(a=4, b=4), weights, lengths)
    assert str(caught.value) == f"{message}\n  {remedy}"


@pytest.mark.parametrize("weights", [{}, {"a": 1, "b": 1}])
def test_an_empty_set_is_refused(weights: Any) -> None:
    with pytest.raises(UserError, match="the data set is empty") as caught:
        join_sets(sets(a=4, b=0), weights, {})
    assert caught.value.key == "data.train.b"


def test_streams_need_weights() -> None:
    with pytest.raises(UserError, match="several streams are mixed by weights") as caught:
        mix_streams({"a": Plain(), "b": Plain()}, {}, {})
    assert (caught.value.key, caught.value.remedy) == ("data.weights", "Set 'data.weights={a: 1, b: 1}'.")
    with pytest.raises(UserError, match="several streams are mixed by weights") as caught:
        mix_streams({"a": Plain(), "b": Plain()}, {}, {"a": 4})
    assert caught.value.key == "data.lengths"


def test_streams_are_drawn_by_their_weights() -> None:
    mixed = mix_streams({"a": Plain(10_000), "b": Plain(10)}, {"a": 3, "b": 1}, {})
    numbers = list(chain(*run(train_loader(mixed, batch_size=50), 0, 40)))
    assert len(numbers) == 2000
    of_a = [number for number in numbers if number >= 10]
    assert of_a == list(range(10, 10 + len(of_a))), "each stream in its order"
    assert 0.7 < len(of_a) / 2000 < 0.8


@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_on_mixed_streams_that_was_cut_reads_what_a_whole_one_reads(workers: int) -> None:
    def make() -> Any:
        return mix_streams({"a": Shards((5, 7)), "b": Numbers(30)}, {"a": 1, "b": 2}, {})

    options = {"num_workers": workers, "skip_on_resume": True}
    whole = cut_run(make, (), 24, **options)
    assert cut_run(make, (4, 5, 14, 20), 24, **options) == whole


def test_each_rank_draws_other_samples_of_each_stream() -> None:
    mixed = mix_streams({"a": Numbers(12), "b": Shards((0, 6, 6))}, {"a": 1, "b": 1}, {})
    parts = [run(train_loader(mixed, rank=rank, world_size=2), 0, 3) for rank in range(2)]
    numbers = [[number for batch in part for number in batch["x"]] for part in parts]
    assert all(numbers)
    assert not set(numbers[0]) & set(numbers[1])
