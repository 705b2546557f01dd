"""The number of samples in a batch of any form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from hydraloop.engine.device.batch_transfer import leaves_of
from hydraloop.errors import UserError


def samples_in(batch: Any, task: str) -> int:
    """Return the length of a batch's first tensor that has dimensions; for a `PackedSequence`, of its sequences.

    Args:
        batch: of any form.
        task: the class of the task, for the error.

    Raises:
        UserError: there is no such tensor.
    """
    for leaf in leaves_of(batch):
        if isinstance(leaf, Tensor) and leaf.ndim:
            return leaf.shape[0]
        if isinstance(leaf, PackedSequence):
            return int(leaf.batch_sizes[0])  # always on the CPU
    raise UserError(
        f"a batch ({_contents(batch)}) has no tensor that shows its number of samples",
        key="task",
        remedy=f"Override num_samples(batch) in {task} and return their number.",
    )


def _contents(batch: Any) -> str:
    """Return the type of a batch and of its entries: "dict with ids: list, text: list"."""
    items = batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, list | tuple) else ()
    entries = ", ".join(f"{name}: {type(item).__name__}" for name, item in list(items)[:10])
    return f"{type(batch).__name__} with {entries}" if entries else type(batch).__name__
