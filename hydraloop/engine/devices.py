"""Moving batches to the device: tensors, and lists, tuples, dicts of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor


def mover(device: torch.device) -> Callable[[Any], Any]:
    """A function that moves a batch to the device; on the CPU it returns the batch as it is.

    Copies from pinned memory do not block the host.
    """
    if device.type == "cpu":
        return _as_it_is

    def move(batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return batch.to(device, non_blocking=True)
        if isinstance(batch, Mapping):
            return {name: move(item) for name, item in batch.items()}
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
            return type(batch)(*(move(item) for item in batch))
        if isinstance(batch, list | tuple):
            return type(batch)(move(item) for item in batch)
        return batch

    return move


def _as_it_is(batch: Any) -> Any:
    return batch
