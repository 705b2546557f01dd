"""The next batch's copy to the device, while the current one is computed on."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader

from hydraloop.engine.device.batch_transfer import has_streams, tensors_of

_Fetched = TypeVar("_Fetched")
_Started = TypeVar("_Started")
_Ready = TypeVar("_Ready")


def prefetched(
    batches: Iterable[Any], move: Callable[[Any], Any], device: torch.device, *, ahead: bool
) -> Iterator[Any]:
    """The batches, moved to the device; the next one's copy runs beside the computation on the current one.

    Where there is nothing to copy beside the computation (the CPU, devices without streams) and where `ahead` is
    false it is `map(move, batches)`: each batch is fetched when it is asked for. Otherwise one batch is fetched ahead
    and copied on a stream of its own, which the current stream waits for; the host waits for neither. Up to three
    batches are then in the device's memory: the one that the caller still holds, the current and the next one (and
    those before, until the device is done with them, where the host runs ahead of it).

    Dropping the iterator or leaving the loop around it drops the iterator of `batches` at once, whose workers end with
    it; an error in fetching or moving a batch is raised where that batch would have come, after the ones before it.

    Args:
        batches: of one epoch, or the rest of one; their memory should be pinned, or the copies block the host.
        move: from `mover(device, …)`; whatever it computes runs on the stream of the copies, too.
        device: where `move` moves to.
        ahead: `reads_ahead(loader)` of the loader the batches come from.
    """
    if not (ahead and has_streams(device)):
        return map(move, batches)
    side = _SideStream(move, device)
    return one_ahead(iter(batches), side.start, side.finish)


def reads_ahead(loader: object) -> bool:
    """Whether a batch may be fetched before it is needed: a torch DataLoader with worker processes makes it.

    Workers are ahead of the training in any case, and have random generators of their own. What is made in this
    process (a DataLoader without workers, a list, a generator) may draw from its generators: fetched ahead, a batch
    would have moved them on when a checkpoint saves their states between two iterations, and the resumed run, which
    fetches that batch again, would go on from other states. The position in a checkpoint counts the batches that were
    trained on, so with workers a batch fetched ahead is fetched again, and no more.
    """
    return isinstance(loader, DataLoader) and loader.num_workers > 0


def one_ahead(
    batches: Iterator[_Fetched], start: Callable[[_Fetched], _Started], finish: Callable[[_Started], _Ready]
) -> Generator[_Ready, None, None]:
    """Each batch, started one before it is handed over: `finish(i)`, then fetch and `start(i + 1)`, then yield i.

    Args:
        batches: closed at the end, if it is a generator, and let go of, whichever way the end comes.
        start: called with what was fetched.
        finish: called with what `start` returned.

    Raises:
        Exception: from fetching or starting a batch, where that batch would have come. An interrupt is not held back.
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
        # A traceback keeps this frame: neither the iterator with its workers nor the error (a cycle) may stay in it.
        del batches, error


_END = object()


def _next_of(batches: Iterator[_Fetched]) -> tuple[_Fetched, ...]:
    """The next batch alone; nothing at the end."""
    batch: Any = next(batches, _END)
    return () if batch is _END else (batch,)


class _SideStream:
    """Copies on a stream of their own; the two halves of it for `one_ahead`."""

    def __init__(self, move: Callable[[Any], Any], device: torch.device) -> None:
        self._move = move
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        self._device = torch.device(device.type, index)
        self._stream = _copy_stream(self._device)

    def start(self, batch: Any) -> Any:
        """Begin the copy, once what is queued by now is done: none of it computes on the batch before this one yet.

        That makes it safe for tensors which are on the device already and still being computed.
        """
        self._stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._stream:
            return self._move(batch)

    def finish(self, moved: Any) -> Any:
        """Let the current stream wait for the copy."""
        current = torch.accelerator.current_stream(self._device)
        current.wait_stream(self._stream)
        # The memory of objects that move themselves is not reused too early either: `start` waits for the current
        # stream before it allocates any.
        for tensor in tensors_of(moved):
            if tensor.device == self._device and tensor.layout is torch.strided:
                # The memory is the side stream's: once freed, nothing may go there before `current` is done with it.
                tensor.record_stream(current)
        return moved


@functools.cache
def _copy_stream(device: torch.device) -> torch.Stream:
    """One for all epochs and runs: the allocator keeps memory by stream, and would keep some for each one."""
    return torch.Stream(device=device)
