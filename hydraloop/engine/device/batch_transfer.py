"""Moves batches to the device: tensors and containers of tensors, and their memory layout there."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions: `[N, C, H, W]` and `[N, C, D, H, W]`."""
_WHOLE = (Tensor, PackedSequence)
"""Not searched by `leaves_of`, although a `PackedSequence` is a tuple."""


def has_streams(device: torch.device) -> bool:
    """Return whether copies from pinned memory to such a device are asynchronous, and can use a separate stream."""
    return device.type in ("cuda", "xpu")


def copies_without_blocking(device: torch.device) -> bool:
    """Return whether copies from the CPU to such a device may use `non_blocking=True`.

    On MPS, such a copy reads memory that the host may have freed or reused (pytorch issue 139550).
    """
    return device.type != "mps"


def mover(device: torch.device, channels_last: bool = False) -> Callable[[Any], Any]:
    """Return a function that moves a batch to the device; on the CPU without `channels_last`, it does nothing.

    Tensors are moved, also in lists, tuples, mappings and dataclasses, which keep their classes (a mapping that is not
    a `dict` or `UserDict` becomes a `dict`). An object with a method `to` (a `PackedSequence`, a batch of PyTorch
    Geometric) moves itself: `to(device, non_blocking=…)`, or `to(device)` if it does not take the option. Numbers,
    strings, bytes, None and any other object are not moved. Copies from pinned memory do not block the host, except on
    MPS.

    Args:
        device: the target.
        channels_last: store floating tensors `[N, C, H, W]` and `[N, C, D, H, W]` with the channels innermost, which
            makes convolutions on tensor cores faster; shapes and values stay. It is done on the device.
    """
    if device.type == "cpu" and not channels_last:
        return lambda batch: batch

    non_blocking = copies_without_blocking(device)

    def to_device(tensor: Tensor) -> Tensor:
        layout = _CHANNELS_LAST.get(tensor.dim()) if channels_last and tensor.is_floating_point() else None
        return tensor.to(device, non_blocking=non_blocking, memory_format=layout or torch.preserve_format)

    def move(batch: Any) -> Any:
        if isinstance(batch, Tensor):
            return to_device(batch)
        if isinstance(batch, dict | UserDict):  # and transformers' BatchEncoding, whose attributes are used too
            moved = copy.copy(batch)
            for name, item in batch.items():
                moved[name] = move(item)
            return moved
        if callable(getattr(type(batch), "to", None)):
            return _move_itself(batch, device)
        if isinstance(batch, Mapping):
            return {name: move(item) for name, item in batch.items()}
        if isinstance(batch, tuple) and hasattr(batch, "_fields"):  # a named tuple
            return tuple.__new__(type(batch), map(move, batch))  # not the constructor, which a subclass may change
        if isinstance(batch, list):
            items = copy.copy(batch)  # a subclass keeps its attributes
            items[:] = map(move, batch)
            return items
        if isinstance(batch, tuple):
            return type(batch)(move(item) for item in batch)
        if _is_dataclass(batch):
            moved = copy.copy(batch)  # not dataclasses.replace, which calls the constructor again
            for name, item in _fields_of(batch):
                object.__setattr__(moved, name, move(item))
            return moved
        return batch

    return move


def _move_itself(batch: Any, device: torch.device) -> Any:
    try:
        moved = batch.to(device, non_blocking=copies_without_blocking(device))
    except TypeError:  # torchvision's ImageList, for example, takes no options
        moved = batch.to(device)
    return batch if moved is None else moved  # None: it was moved in place, as a module is


def leaves_of(batch: Any) -> Iterator[Any]:
    """Yield every entry of the containers that `mover` searches: tensors, strings, packed sequences, other objects."""
    if isinstance(batch, _WHOLE):  # first, because a task asks in every iteration
        yield batch
    elif isinstance(batch, list | tuple):
        for item in batch:
            yield from leaves_of(item)
    elif isinstance(batch, Mapping):
        for item in batch.values():
            yield from leaves_of(item)
    elif _is_dataclass(batch):
        for _, item in _fields_of(batch):
            yield from leaves_of(item)
    else:
        yield batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor that `mover` moves, except those in objects that move themselves."""
    for leaf in leaves_of(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, PackedSequence):
            yield from (tensor for tensor in leaf if tensor is not None)


def _is_dataclass(value: object) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _fields_of(value: Any) -> Iterator[tuple[str, Any]]:
    """Return (name, value) for the fields that have a value."""
    names = (field.name for field in dataclasses.fields(value))
    return ((name, getattr(value, name)) for name in names if hasattr(value, name))
