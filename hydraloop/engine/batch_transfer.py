"""Moves batches to the device, and copies the next batch while the device computes on the current one."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from typing import Any, TypeVar

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


def to_cpu(value: Any) -> Any:
    """Return containers with all tensors on the CPU."""
    return tree_map(lambda leaf: leaf.cpu() if isinstance(leaf, Tensor) else leaf, value)


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


_Fetched = TypeVar("_Fetched")
_Started = TypeVar("_Started")
_Ready = TypeVar("_Ready")


def prefetched(
    batches: Iterable[Any], move: Callable[[Any], Any], device: torch.device, *, ahead: bool
) -> Iterator[Any]:
    """Iterate over the batches on the device; the next batch is copied while the device computes on the current one.

    On the CPU and devices without streams, and if `ahead` is false, this is `map(move, batches)`. Otherwise one batch
    is fetched ahead and copied on a separate stream, for which the current stream waits; the host does not wait. The
    device then holds the current and the next batch, and the previous one while the caller or the device uses it.

    When the iterator is dropped, the iterator of `batches` is dropped at once, and its workers end. An error in
    fetching or moving a batch is raised in place of that batch, after the ones before it.

    Args:
        batches: of one epoch, or its rest; their memory should be pinned, or the copies block the host.
        move: from `mover(device, …)`; runs on the stream of the copies.
        device: the target of `move`.
        ahead: `reads_ahead(loader)` of the batches' loader.
    """
    if not (ahead and has_streams(device)):
        return map(move, batches)
    side = _SideStream(move, device)
    return one_ahead(iter(batches), side.start, side.finish)


def reads_ahead(loader: object) -> bool:
    """Return whether a batch may be fetched before it is needed: only from a loader with worker processes.

    Workers have their own random generators. Any other loader may draw from the generators of this process. If it
    fetched a batch ahead, a checkpoint would save the generators after the draws for that batch, and the resumed run,
    which fetches it again, would draw other numbers. A loader with its own `state_dict` would save a position that is
    one batch too far.
    """
    return getattr(loader, "num_workers", 0) > 0 and not hasattr(loader, "state_dict")


def one_ahead(
    batches: Iterator[_Fetched], start: Callable[[_Fetched], _Started], finish: Callable[[_Started], _Ready]
) -> Generator[_Ready, None, None]:
    """Yield each batch after the next one was started: `finish(i)`, then fetch and `start(i + 1)`, then yield i.

    Args:
        batches: dropped at the end, also after an error; a generator is closed.
        start: called with a fetched batch.
        finish: called with what `start` returned.

    Raises:
        Exception: from fetching or starting a batch, in place of that batch. An interrupt is raised at once.
    """
    error: Exception | None = None
    try:
        started = [start(batch) for batch in _next_of(batches)]
        while started:
            current = [finish(started.pop())]
            try:
                started = [start(batch) for batch in _next_of(batches)]
            except Exception as raised:
                error = raised
            yield current.pop()
            if error is not None:
                raise error
    finally:
        if isinstance(batches, Generator):
            batches.close()
        # A traceback keeps this frame, so remove the iterator, which has the workers, and the error, a cycle.
        del batches, error


_END = object()


def _next_of(batches: Iterator[_Fetched]) -> tuple[_Fetched, ...]:
    """Return the next batch in a tuple; an empty tuple at the end."""
    batch: Any = next(batches, _END)
    return () if batch is _END else (batch,)


class _SideStream:
    """Copies on a separate stream: `start` and `finish` for `one_ahead`."""

    def __init__(self, move: Callable[[Any], Any], device: torch.device) -> None:
        self._move = move
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self._device = torch.device(device.type, index)
        self._stream = _copy_stream(self._device)

    def start(self, batch: Any) -> Any:
        """Start the copy after all work that is queued now, so that tensors on the device have been computed."""
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            return self._move(batch)

    def finish(self, moved: Any) -> Any:
        """Let the current stream wait for the copy."""
        current = torch.accelerator.current_stream(self._device)
        current.wait_stream(self._stream)
        # The memory of objects that move themselves is not reused too early, because `start` waits for the current
        # stream before it allocates any.
        for tensor in tensors_of(moved):
            if tensor.device == self._device and tensor.layout is torch.strided:
                # The side stream owns the memory: it may not reuse it before `current` is done with it.
                tensor.record_stream(current)
        return moved


@functools.cache
def _copy_stream(device: torch.device) -> torch.Stream:
    """Return one stream for all epochs and runs, because the allocator keeps memory for each stream."""
    return torch.Stream(device=device)
