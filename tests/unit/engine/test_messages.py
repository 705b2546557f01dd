"""Messages: facts on demand, scalars as means over a window, one host sync a record."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hydraloop.engine.distributed import Distributed
from hydraloop.engine.messages import Messages
from hydraloop.errors import UserError
from tests.helpers import HostSyncs
from tests.ranks import on_ranks


def test_facts_are_read_when_somebody_asks() -> None:
    messages = Messages()
    epoch = 0
    messages.provide("epoch", lambda: epoch)
    messages.provide("lr", lambda: 0.1)
    epoch = 3
    assert messages.read("epoch") == 3
    assert messages.read("nobody's") is None
    assert messages.read("nobody's", 7) == 7
    messages.provide("epoch", lambda: -1)
    assert messages.facts() == {"epoch": -1, "lr": 0.1}


def test_means_over_floats_and_tensors_and_an_empty_window_afterwards() -> None:
    messages = Messages()
    for value in (1.0, 2.0, 6.0):
        messages.add("time", value)
        messages.add("loss", torch.tensor(value * 10))
    messages.add("grad_norm", torch.tensor(5.0, dtype=torch.bfloat16))
    messages.add("mixed", 1)
    messages.add("mixed", torch.tensor(2.0))
    assert messages.means() == {"time": 3.0, "loss": 30.0, "grad_norm": 5.0, "mixed": 1.5}
    assert messages.means() == {}
    messages.add("loss", 4.0)
    assert messages.means() == {"loss": 4.0}, "nothing is left of the last window"


@pytest.mark.parametrize("count", [255, 256, 257, 1000])
def test_folding_keeps_the_mean_and_bounds_what_is_kept(count: int) -> None:
    messages = Messages()
    for value in range(count):
        messages.add("loss", torch.tensor(float(value)))
        messages.add("time", float(value))
    assert all(len(window.values) < 256 for window in messages._windows.values())
    assert messages.means() == {"loss": (count - 1) / 2, "time": (count - 1) / 2}


def test_means_are_summed_in_double_precision() -> None:
    messages = Messages()
    for value in (2.0**24, 1.0, 1.0, 1.0):  # in float32 the ones would be lost
        messages.add("loss", torch.tensor(value))
    assert messages.means()["loss"] == (2.0**24 + 3) / 4


def test_an_integer_or_boolean_tensor_has_a_mean_too() -> None:
    messages = Messages()
    for correct in (True, False, True, True):
        messages.add("correct", torch.tensor(correct))
        messages.add("count", torch.tensor(int(correct)))
    assert messages.means() == {"correct": 0.75, "count": 0.75}


def means_of_ranks(distributed: Distributed, own_name: bool) -> dict[str, float]:
    """Messages of two ranks: `a` is 1 and 2, `b` 2 and 4; with `own_name` rank 1 has a `c` of 5, too."""
    messages = Messages()
    for value in (0.0, 2.0):
        messages.add("a", value * (distributed.rank + 1))
        messages.add("b", torch.tensor(value * 2 * (distributed.rank + 1)))
    if own_name and distributed.rank == 1:
        messages.add("c", 5.0)
    return messages.means(distributed)


@pytest.mark.parametrize("own_name", [False, True])
def test_means_over_the_ranks_are_the_same_on_all(own_name: bool) -> None:
    expected = {"a": 1.5, "b": 3.0} | ({"c": 5.0} if own_name else {})
    assert on_ranks(2, means_of_ranks, own_name) == [expected, expected]


def many_means(distributed: Distributed) -> dict[str, float]:
    """More names than fit into one exchange of the usual size."""
    messages = Messages()
    for index in range(300):
        messages.add(f"name{index}", float(index + distributed.rank))
    return messages.means(distributed)


def test_any_number_of_names() -> None:
    for means in on_ranks(2, many_means):
        assert means == {f"name{index}": index + 0.5 for index in range(300)}


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([torch.ones(4), torch.ones(4)], "shape [4]"),
        ([torch.ones(()), torch.ones(3)], "shape [3]"),
        ([torch.ones((), requires_grad=True)], "detach()"),
        ([0.5, "high"], "'high'"),
        ([None], "None"),
    ],
)
def test_what_is_no_detached_scalar_is_named_at_the_next_record(values: list[Any], words: str) -> None:
    messages = Messages()
    messages.add("loss", torch.tensor(1.0))
    for value in values:
        messages.add("mine", value)
    with pytest.raises(UserError) as caught:
        messages.means()
    assert "'mine'" in str(caught.value)
    assert words in str(caught.value)


def test_a_tensor_of_one_entry_is_a_scalar() -> None:
    messages = Messages()
    messages.add("mine", torch.tensor([3.0]))
    messages.add("mine", torch.tensor(5.0))
    assert messages.means() == {"mine": 4.0}


def test_adding_costs_no_host_sync_and_a_record_one() -> None:
    messages = Messages()
    with HostSyncs() as syncs:
        for value in range(600):
            for name in ("loss", "aux_loss", "grad_norm"):
                messages.add(name, torch.tensor(float(value)))
            messages.add("time", 0.1)
        assert syncs.count == 0
        messages.means()
        assert syncs.count == 1


def test_the_counter_of_host_syncs_counts() -> None:
    with HostSyncs() as syncs:
        value = torch.tensor(1.5)
        assert float(value) == value.item() == value.tolist()
    assert syncs.count == 3
