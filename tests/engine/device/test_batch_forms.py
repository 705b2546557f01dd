"""Batches of any form: each is moved, counted and trained on, also by several ranks with accumulation."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from hydraloop.engine.batch_transfer import leaves_of, mover, tensors_of
from hydraloop.tasks import Task

META = torch.device("meta")


class Pair(NamedTuple):
    """A named tuple."""

    inputs: Tensor
    name: str
    targets: Tensor


class Encoding(UserDict[str, Any]):
    """A mapping that moves itself, as transformers' BatchEncoding."""

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Encoding:
        """Move the tensors."""
        return Encoding({name: value.to(device, non_blocking=non_blocking) for name, value in self.items()})


class Graph:
    """Moves itself."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def to(self, device: torch.device) -> Graph:
        """Move the tensors."""
        return Graph(self.inputs.to(device), self.targets.to(device))


def packed(x: Tensor) -> PackedSequence:
    """Each sample as a sequence of its numbers."""
    return pack_padded_sequence(x.unsqueeze(-1), torch.full((len(x),), x.size(1)), batch_first=True)


def unpacked(sequences: PackedSequence) -> Tensor:
    """What `packed` was given, with the same layout in memory, on which the last bits of a product depend."""
    return pad_packed_sequence(sequences, batch_first=True)[0][..., 0].contiguous()


Pack = Callable[[Tensor, Tensor], Any]
Unpack = Callable[[Any], tuple[Tensor, Tensor]]
FORMS: dict[str, tuple[Pack, Unpack]] = {
    "tuple": (lambda x, y: (1, "a", None, x, b"x", y), lambda b: (b[3], b[5])),
    "named tuple": (lambda x, y: Pair(x, "a", y), lambda b: (b.inputs, b.targets)),
    "OrderedDict": (lambda x, y: OrderedDict(n=1.5, x=x, y=y), lambda b: (b["x"], b["y"])),
    "mapping that moves itself": (lambda x, y: Encoding(x=x, y=y), lambda b: (b["x"], b["y"])),
    "PackedSequence": (lambda x, y: (packed(x), y), lambda b: (unpacked(b[0]), b[1])),
    "object and tensor": (lambda x, y: {"graph": Graph(x, y), "n": torch.ones(len(x))}, lambda b: pair(b["graph"])),
    "nested": (
        lambda x, y: {"views": [{"meta": [None, "a", (2, b"x")]}, {"x": Pair(x, "a", y)}]},
        lambda b: pair(b["views"][1]["x"]),
    ),
}  # fmt: skip


def pair(batch: Any) -> tuple[Tensor, Tensor]:
    """The inputs and targets of an object with these attributes."""
    return batch.inputs, batch.targets


@pytest.mark.parametrize("form", FORMS)
def test_a_batch_is_moved_and_keeps_its_form(form: str) -> None:
    pack, unpack = FORMS[form]
    batch = pack(torch.zeros(4, 3), torch.zeros(4, 1))
    moved = mover(META)(batch)
    assert type(moved) is type(batch)
    assert [type(leaf) for leaf in leaves_of(moved)] == [type(leaf) for leaf in leaves_of(batch)]
    if form != "PackedSequence":  # cannot be unpacked without memory
        assert {tensor.device for tensor in (*unpack(moved), *tensors_of(moved))} == {META}
    assert {tensor.device.type for tensor in unpack(batch)} == {"cpu"}, "the batch of the loader stays as it is"
    assert Task(nn.Linear(3, 1), nn.MSELoss()).num_samples(moved) == 4
