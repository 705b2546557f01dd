"""Messages: facts on demand, scalars as means over a window, one host sync a record."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from hydraloop.engine.messages import Messages
from tests.helpers import HostSyncs


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


def test_reduce_is_called_once_with_all_means_in_order() -> None:
    messages = Messages()
    for name, value in (("a", 1.0), ("b", torch.tensor(2.0)), ("c", 3.0)):
        messages.add(name, value)
    seen: list[Tensor] = []

    def reduce(means: Tensor) -> Tensor:
        seen.append(means)
        return means * 10

    assert messages.means(reduce) == {"a": 10.0, "b": 20.0, "c": 30.0}
    assert len(seen) == 1
    assert seen[0].shape == (3,)
    assert seen[0].dtype == torch.float64


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
