"""Moves batches to the device: tensors, containers of tensors and objects that move themselves."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map  # torch has no public function for nested containers

_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
"""By the number of dimensions: `[N, C, H, W]` and `[N, C, D, H, W]`."""


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

    Tensors are moved, also in lists, tuples, named tuples and dicts. An object with a method `to` (a `PackedSequence`,
    a batch of transformers or PyTorch Geometric) moves itself: `to(device, non_blocking=…)`, or `to(device)` if it does
    not take the option. Any other object is not moved. Copies from pinned memory do not block the host, except on MPS.

    Args:
        device: the target.
        channels_last: store floating tensors `[N, C, H, W]` and `[N, C, D, H, W]` with the channels innermost, which
            makes convolutions on tensor cores faster; shapes and values stay. It is done on the device.
    """
    if device.type == "cpu" and not channels_last:
        return lambda batch: batch
    non_blocking = copies_without_blocking(device)

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            layout = _CHANNELS_LAST.get(leaf.dim()) if channels_last and leaf.is_floating_point() else None
            return leaf.to(device, non_blocking=non_blocking, memory_format=layout or torch.preserve_format)
        if not _moves_itself(leaf):
            return leaf
        try:
            return leaf.to(device, non_blocking=non_blocking)
        except TypeError:  # torchvision's ImageList, for example, takes no options
            return leaf.to(device)

    return lambda batch: tree_map(move, batch, is_leaf=_moves_itself)


def leaves_of(batch: Any) -> Iterator[Any]:
    """Yield every entry of the containers that `mover` searches: tensors, strings, packed sequences, other objects.

    A mapping that moves itself, such as transformers' `BatchEncoding`, is searched, too.
    """
    for leaf in tree_leaves(batch, is_leaf=_moves_itself):
        if isinstance(leaf, Mapping):
            yield from leaves_of(dict(leaf))
        else:
            yield leaf


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """Yield every tensor of `leaves_of`."""
    return (leaf for leaf in leaves_of(batch) if isinstance(leaf, Tensor))


def _moves_itself(value: Any) -> bool:
    return callable(getattr(type(value), "to", None))
