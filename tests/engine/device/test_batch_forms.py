"""Batches of any form: each is moved, counted and trained on, also by several ranks with accumulation."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.utils.data import TensorDataset, default_collate

from hydraloop.data import build_loader
from hydraloop.engine.device.batch_transfer import leaves_of, mover, tensors_of
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.settings import Settings
from hydraloop.hooks import EMAHook
from hydraloop.tasks import Task
from tests.helpers import EngineWithNeededHooks
from tests.ranks import on_ranks

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


class AnyForm(Task):
    """A mean squared error on batches of one form."""

    def __init__(self, form: str) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Linear(3, 1), nn.MSELoss())
        self.unpack = FORMS[form][1]

    def forward(self, batch: Any) -> dict[str, Any]:
        """The loss."""
        inputs, targets = self.unpack(batch)
        return {"loss": self.loss(self.model(inputs), targets)}


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
    assert AnyForm(form).num_samples(moved) == 4


def train(distributed: Distributed, run_dir: str) -> dict[str, list[Tensor]]:
    """Two epochs of 17 samples in windows of three batches; returns weights and their averages, by form."""
    return {form: _train(distributed, form, Path(run_dir)) for form in FORMS}


def _collate(form: str, samples: list[Any]) -> Any:
    return FORMS[form][0](*default_collate(samples))


def _train(distributed: Distributed, form: str, run_dir: Path) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(17, 3, generator=generator), torch.randn(17, 1, generator=generator))
    ranks = {"rank": distributed.rank, "world_size": distributed.world_size}
    collate = partial(_collate, form)
    loader = build_loader(data, shuffle=True, batch_size=2, collate_fn=collate, **ranks)
    task, average = AnyForm(form), EMAHook()
    engine = EngineWithNeededHooks(
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=0.1, momentum=0.9),
        loaders=Loaders(loader),
        hooks={"ema": average},
        settings=Settings(device="cpu", max_epochs=2, accumulate=3, channels_last=True),
        run_dir=run_dir,
        distributed=distributed,
    )
    engine.train()
    assert engine.progress.samples == 34
    return [*task.state_dict().values(), *average.state_dict()["averaged"].values()]


@pytest.mark.slow
def test_two_ranks_with_accumulation_train_on_every_form_alike(tmp_path: Path) -> None:
    """`channels_last` makes the mover search batches on the CPU too."""
    first, second = on_ranks(2, train, str(tmp_path))
    for form in FORMS:
        for one, other, expected in zip(first[form], second[form], first["tuple"], strict=True):
            assert torch.equal(one, other), form
            assert torch.equal(one, expected), form
