"""Moving batches to the device: tensors, and lists, tuples, dicts of them; and their layout in memory there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions: `[N, C, H, W]` and `[N, C, D, H, W]`."""


def has_streams(device: torch.device) -> bool:
    """Whether copies from pinned memory to such a device are asynchronous, and can go on a stream of their own."""
    return device.type in ("cuda", "xpu")


def copies_without_blocking(device: torch.device) -> bool:
    """Return whether copies from the CPU to such a device may use `non_blocking=True`.

    On MPS, such a copy reads memory that the host may have freed or reused (pytorch issue 139550).
    """
    return device.type != "mps"


def mover(device: torch.device, channels_last: bool = False) -> Callable[[Any], Any]:
    """A function that moves a batch to the device; on the CPU, without `channels_last`, it returns it as it is.

    Copies from pinned memory do not block the host, except on MPS. What is no tensor, list, tuple or mapping stays as
    it is.

    Args:
        device: where to.
        channels_last: lay floating tensors `[N, C, H, W]` and `[N, C, D, H, W]` out in memory with the channels
            innermost, as convolutions on tensor cores want it; shapes and values stay. An accelerator does it itself,
            after the copy.
    """
    if device.type == "cpu" and not channels_last:
        return _as_it_is

    non_blocking = copies_without_blocking(device)

    def to_device(tensor: Tensor) -> Tensor:
        if channels_last and tensor.dim() in _CHANNELS_LAST and tensor.is_floating_point():
            return tensor.to(device, non_blocking=non_blocking, memory_format=_CHANNELS_LAST[tensor.dim()])
        return tensor.to(device, non_blocking=non_blocking)

    def move(batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return to_device(batch)
        if isinstance(batch, Mapping):
            return {name: move(item) for name, item in batch.items()}
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
            return type(batch)(*(move(item) for item in batch))
        if isinstance(batch, list | tuple):
            return type(batch)(move(item) for item in batch)
        return batch

    return move


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Every tensor that `mover` moves."""
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from tensors_of(item)
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from tensors_of(item)


def _as_it_is(batch: Any) -> Any:
    return batch
