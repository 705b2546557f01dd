"""Messages: facts on demand, scalars as means between records, one host sync per record."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from hydraloop.engine.distributed.comm import Distributed
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


def test_values_of_inference_and_of_training_are_in_one_mean() -> None:
    messages = Messages()
    with torch.inference_mode():
        messages.add("loss", torch.tensor(1.0))
    messages.add("loss", torch.tensor(2.0))
    assert messages.means() == {"loss": 1.5}


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


@pytest.mark.parametrize("value", [torch.tensor(300.5, dtype=torch.float16), torch.tensor(200, dtype=torch.uint8)])
def test_a_weighted_value_of_a_small_type_is_exact(value: torch.Tensor) -> None:
    messages = Messages()
    messages.add("mine", value, 255)
    assert messages.means() == {"mine": value.item()}


def means_of_names(distributed: Distributed, records: list[list[list[str]]]) -> list[dict[str, float]]:
    """Add the names that this rank has, record by record. A value is the number in the name plus the rank."""
    messages, all_means = Messages(), []
    for names_of in records:
        for name in names_of[distributed.rank]:
            messages.add(name, float(name[1:]) + distributed.rank)
        all_means.append(messages.means(distributed))
    return all_means


def _expected(record: list[list[str]]) -> dict[str, float]:
    ranks_with = {
        name: [rank for rank, names in enumerate(record) if name in names] for names in record for name in names
    }
    return {name: float(name[1:]) + sum(ranks) / len(ranks) for name, ranks in ranks_with.items()}


def test_values_of_different_names_are_never_mixed() -> None:
    names = [f"n{number}" for number in range(300)]
    records = [
        [names[:1], names],
        [names[1:3], names[2:4]],
        [[], names[:2]],
        [[], []],
    ]
    expected = [_expected(record) for record in records]
    assert on_ranks(2, means_of_names, records) == [expected, expected]


class _Counting(Distributed):
    """Records the collectives of this rank."""

    def __init__(self) -> None:
        self.world_size = 2
        self.asked: list[str] = []

    def sum(self, values: torch.Tensor) -> torch.Tensor:
        self.asked.append("sum")
        return values * 2

    def gather(self, value: Any) -> list[Any]:
        self.asked.append("gather")
        return [value, value]


def test_a_record_with_known_names_costs_one_exchange() -> None:
    messages, ranks = Messages(), _Counting()
    for names in ("ab", "ab", "a", "ba"):
        for name in names:
            messages.add(name, 3.0)
        assert messages.means(ranks) == dict.fromkeys(names, 3.0)
    assert ranks.asked == ["gather"] * 4


class _ReadableMeta(TorchFunctionMode):
    """Makes tensors without data (device `meta`) read as 7; everything else is torch's own behavior."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "__name__", "") == "tolist" and args[0].is_meta:
            return torch.full(args[0].shape, 7.0).tolist()
        return func(*args, **(kwargs or {}))


def _add_on_two_devices(messages: Messages, device: str) -> None:
    for _ in range(300):
        messages.add("loss", torch.full((), 7.0, device=device))
    messages.add("grad_norm", torch.tensor(5.0))
    messages.add("time", 0.5)
    messages.add("moved", torch.tensor(3.0))
    messages.add("moved", torch.full((), 7.0, device=device))


def test_scalars_of_several_devices_are_in_one_record() -> None:
    messages = Messages()
    _add_on_two_devices(messages, "meta")
    with _ReadableMeta():
        means = messages.means()
    assert set(means) == {"loss", "grad_norm", "time", "moved"}
    assert (means["grad_norm"], means["time"]) == (5.0, 0.5)


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="there is one device")
def test_scalars_of_an_accelerator_and_the_host_are_in_one_record() -> None:
    messages = Messages()
    _add_on_two_devices(messages, str(torch.accelerator.current_accelerator()))
    assert messages.means() == {"loss": 7.0, "grad_norm": 5.0, "time": 0.5, "moved": 5.0}


def test_a_value_with_its_graph_is_named() -> None:
    with pytest.raises(UserError, match=r"'mine'.*\n.*detach\(\)"):
        Messages().add("mine", torch.ones((), requires_grad=True))


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


def weighted(distributed: Distributed) -> dict[str, float]:
    """Rank 0 has 3 samples with the value 1, rank 1 one with the value 5, and another name without weights."""
    messages = Messages()
    value, weight = ((1.0, 3), (5.0, 1))[distributed.rank]
    messages.add("mine", torch.tensor(value), weight)
    messages.add("plain", value)
    if distributed.is_main:
        messages.add("one_rank", 2.0, 4)
    return messages.means(distributed)


def test_weights_count_over_iterations_and_ranks() -> None:
    messages = Messages()
    for value, weight in ((1.0, 3), (5.0, 1)):
        messages.add("mine", value, weight)
        messages.add("plain", value)
    assert messages.means() == {"mine": 2.0, "plain": 3.0}
    assert on_ranks(2, weighted) == [{"mine": 2.0, "plain": 3.0, "one_rank": 2.0}] * 2
