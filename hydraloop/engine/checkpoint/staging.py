"""Staging: copies a checkpoint to host memory, so that a thread can write it while training changes the tensors."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor

from hydraloop.engine.checkpoint.format import Checkpoint
from hydraloop.engine.checkpoint.shards import with_replaced
from hydraloop.engine.distributed.buckets import buckets

log = logging.getLogger(__name__)

_Kind = tuple[torch.dtype, torch.Size, tuple[int, ...], torch.device]
"""A tensor's type, shape, strides and device. Its buffer in host memory is allocated by these."""
_Place = tuple[int, _Kind]
"""A tensor's address and kind. Tied weights have the same, so they are copied once."""


class Staging:
    """Copies checkpoints to host memory. Its memory is kept for the next copy; that of a GPU's tensors is pinned.

    Args:
        limit: bytes that a copy may need; None: a quarter of the memory that is free at the first copy.
        processes: number of processes on this machine that copy at the same time, and share the quarter.
    """

    def __init__(self, limit: int | None = None, processes: int = 1) -> None:
        self._limit = limit
        self._processes = processes
        self._has_warned = False
        self._kinds: list[_Kind] = []
        """The kinds of the tensors in the last copy, in order. A copy of the same kinds uses the buffers again."""
        self._buffers: list[Tensor] = []
        self._events: list[torch.cuda.Event] = []

    def copy(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Return a copy that is complete after `wait`; None if it needs too much memory. No device sync."""
        tensors: dict[_Place, Tensor] = {}
        _with_tensors(checkpoint, lambda value: tensors.setdefault(_place(value), value.detach()))
        kinds = [kind for _, kind in tensors]
        if kinds != self._kinds:
            self.free()
            if not self._fits(sum(tensor.nbytes for tensor in tensors.values())):
                return None
            self._kinds = kinds
            self._buffers = _allocated(list(tensors.values()))
        copies = dict(zip(tensors, self._buffers, strict=True))
        for place, tensor in tensors.items():
            copies[place].copy_(tensor, non_blocking=tensor.is_cuda)
        gpus = {tensor.device for tensor in tensors.values() if tensor.is_cuda}
        self._events = [torch.cuda.current_stream(gpu).record_event() for gpu in gpus]
        return _with_tensors(checkpoint, lambda value: copies[_place(value)])

    def _fits(self, size: int) -> bool:
        if self._limit is None:
            import psutil

            self._limit = psutil.virtual_memory().available // (4 * self._processes)
        fits = size <= self._limit
        if not fits and not self._has_warned:
            self._has_warned = True
            log.info(
                "a copy of the checkpoint needs more than %.1f GiB, a quarter of the free memory, so training waits"
                " until checkpoints are written",
                self._limit / 2**30,
            )
        return fits

    def wait(self) -> None:
        """Wait until the copies of a GPU's tensors have arrived."""
        for event in self._events:
            event.synchronize()

    def free(self) -> None:
        """Free all buffers."""
        self._kinds = []
        self._buffers = []


def _place(value: Tensor) -> _Place:
    return value.data_ptr(), (value.dtype, value.shape, value.stride(), value.device)


def _with_tensors(checkpoint: Checkpoint, replace: Callable[[Tensor], Tensor]) -> Checkpoint:
    """Return a copy with other tensors. Tensors that are not plain (sparse, quantized) are copied on their device."""

    def replace_or_copy(value: Any, path: str) -> Any:
        if not isinstance(value, Tensor):
            return copy(value) if type(value) is set else value
        plain = type(value) is Tensor and value.layout is torch.strided and not (value.is_quantized or value.is_meta)
        return replace(value) if plain else deepcopy(value.detach())

    copied: Checkpoint = with_replaced(checkpoint, replace_or_copy)
    return copied


def _allocated(tensors: list[Tensor]) -> list[Tensor]:
    """Return host memory for each tensor, in few allocations: pinning takes about a millisecond each.

    Each buffer has a storage of its own, a part of the memory, so that a file has an entry for each tensor.
    """
    buffers: dict[int, Tensor] = {}
    for bucket in buckets(tensors):
        size = sum(tensor.nbytes for tensor in bucket)
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=bucket[0].is_cuda).untyped_storage()
        start = 0
        for tensor in bucket:
            like = torch.empty_like(tensor, device="meta")  # strides without the gaps of a view
            part = memory[start : start + tensor.nbytes]
            buffers[id(tensor)] = torch.empty(0, dtype=tensor.dtype).set_(part, 0, like.shape, like.stride())
            start += tensor.nbytes
    return [buffers[id(tensor)] for tensor in tensors]
