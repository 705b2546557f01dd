"""What layers of torch take, for errors."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

Needed = tuple[str, tuple[int, int] | None]
"""What a layer takes, as text; and a size that it needs with the size that it got, None if the size is not the
mistake."""

_CONVOLUTIONS = (
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip


def needed_input(layer: Any, got: Tensor, error: Exception) -> Needed | None:
    """Return what a layer of torch takes if it cannot take `got`; None if that is not the mistake.

    Args:
        error: of the layer. Only its message tells a wrong type from autocast, which has ended.
    """
    found = _needed_shape(layer, got)
    if found is not None or not re.search(r"dtype|scalar type|Input type", str(error)):
        return found
    if isinstance(layer, nn.Embedding):
        return "int64 or int32", None
    types = [weight.dtype for weight in layer.parameters(recurse=False) if weight.dtype != got.dtype]
    return (f"{_name(types[0])}, the type of its weights", None) if types else None


def _needed_shape(layer: Any, got: Tensor) -> Needed | None:
    if isinstance(layer, nn.Embedding):
        largest = int(got.max()) if got.numel() and not got.is_floating_point() else 0
        size = layer.num_embeddings
        return (f"indices below {size}; the largest is {largest}", (size, largest + 1)) if largest >= size else None
    if isinstance(layer, _CONVOLUTIONS):
        after = len(layer.kernel_size)
        takes = f"[N, {layer.in_channels}{', *' * after}]"
        if got.ndim == after + 2 and got.size(-1) == layer.in_channels != got.size(1):
            return f"{takes}: the channels come before height and width", None
        channels = got.size(-after - 1) if got.ndim > after else 0
        fits = got.ndim in (after + 1, after + 2) and channels == layer.in_channels
        return None if fits else (takes, (layer.in_channels, got.size(1)) if got.ndim == after + 2 else None)
    for name, place, takes in (
        ("in_features", -1, "[..., {}]"),
        ("input_size", -1, "[..., {}]"),
        ("embed_dim", -1, "[..., {}]"),
        ("num_features", 1, "[N, {}, ...]"),
    ):
        wanted = getattr(layer, name, None)
        if isinstance(wanted, int) and (got.ndim < 2 - (place < 0) or got.size(place) != wanted):
            return takes.format(wanted), (wanted, got.size(place)) if got.ndim > max(place, 0) else None
    shape = getattr(layer, "normalized_shape", None)
    if shape is not None and tuple(got.shape[-len(shape) :]) != tuple(shape):
        return f"[..., {', '.join(map(str, shape))}]", None
    return None


def described(value: Any) -> str:
    """Return the type of a value, that of a tensor with its shape: `float32 [64, 2]`."""
    return f"{_name(value.dtype)} {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
