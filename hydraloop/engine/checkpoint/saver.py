"""Saver: writes one checkpoint at a time, in a thread from a copy, while training continues."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy, deepcopy
from typing import Any

import torch
from torch import Tensor

from hydraloop.engine.checkpoint.format import Checkpoint, check_loadable
from hydraloop.engine.device.choose import same_device
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.errors import PeerError
from hydraloop.run.result import describe

log = logging.getLogger(__name__)


class Saver:
    """Writes the checkpoints of an engine on rank 0, with FSDP2 on every rank. All ranks settle a save together.

    Args:
        failed: called in the thread after an error that is not an `OSError`; `check` then raises it.
        limit: number of bytes that copies may need; None: a quarter of the free memory.
    """

    def __init__(self, distributed: Distributed, failed: Callable[[], object], limit: int | None = None) -> None:
        self._distributed, self._failed = distributed, failed
        self._staging = Staging(limit, distributed.local_world_size if distributed.sharded else 1)
        self._thread: ThreadPoolExecutor | None = None
        """Kept between saves: `Thread.start` would wait for the interpreter, 1.4 ms for each save."""
        self._writing: Future[None] | None = None
        self._done: Callable[[bool], object] | None = None
        """Of the save that is not settled."""
        self._outcome: bool | Exception = False
        """On a rank that writes: whether the file was written, or why not."""

    def start(
        self,
        checkpoint: Checkpoint,
        write: Callable[[Checkpoint], bool],
        done: Callable[[bool], object],
        *,
        asynchronous: bool,
    ) -> bool:
        """Write a checkpoint; called on every rank, after `settle`.

        Args:
            checkpoint: may change after this call.
            write: writes it and returns whether it could; called on rank 0 (with FSDP2, on every rank), in a thread if
                asynchronous.
            done: called on every rank when the save is settled, with what `write` returned.
            asynchronous: return after the copy, unless it needs too much memory.

        Returns:
            Whether the file was written; True if a thread writes it.
        """
        self._done, self._outcome = done, False
        copied: Checkpoint | None = None
        writes = self._distributed.is_main or self._distributed.sharded
        try:
            if writes:
                check_loadable(checkpoint, "checkpoint")
                copied = self._staging.copy(checkpoint) if asynchronous else None
        except Exception as error:
            self._outcome = error
        told = self._distributed.gather([self._outcome is False, copied is not None or not writes])
        asynchronous = asynchronous and all(has_copied for _, has_copied in told)
        try:
            if writes and all(ready for ready, _ in told):  # ranks that write together wait for each other
                if asynchronous and copied is not None:
                    self._thread = self._thread or ThreadPoolExecutor(
                        1, thread_name_prefix="hydraloop-save", initializer=same_device()
                    )
                    self._writing = self._thread.submit(self._write, copied, write)
                else:
                    self._outcome = write(checkpoint)
        except Exception as error:
            self._outcome, self._writing = error, None
        return asynchronous or self.settle()

    def _write(self, copied: Checkpoint, write: Callable[[Checkpoint], bool]) -> None:
        try:
            self._staging.wait()
            self._outcome = write(copied)
        except Exception as error:
            self._outcome = error
            self._failed()

    def settle(self) -> bool:
        """Wait for the thread; called on every rank. Return whether the last file was written; True without a save.

        Raises:
            PeerError: rank 0 has raised another error than an `OSError`.
        """
        if self._done is None:
            return True
        self._join()
        outcome, done = self._outcome, self._done
        self._done = None
        told = self._distributed.from_main(describe(outcome) if isinstance(outcome, Exception) else outcome)
        done(told is True)
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(told, str):
            raise PeerError(f"rank 0 could not write a checkpoint: {told}")
        return bool(told)

    def check(self) -> None:
        """Raise the error of this rank's thread, if there is one."""
        if isinstance(self._outcome, Exception) and self._done is not None:
            self._join()
            done, self._done = self._done, None
            done(False)
            raise self._outcome

    def close(self) -> None:
        """Free the buffers. After an error of the run, first wait for the thread, but not for the other ranks."""
        if self._done is not None:
            self._join()
            done, self._done = self._done, None
            done(self._outcome is True)
            if isinstance(self._outcome, Exception):
                log.error("a checkpoint could not be written: %s", describe(self._outcome), exc_info=self._outcome)
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._staging.free()

    def _join(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None


class _TooLargeError(Exception):
    """The copy would need more memory than the limit."""


_Kind = tuple[torch.dtype, torch.Size, tuple[int, ...], bool]
"""What the tensors of one buffer have in common: type, shape, strides, and whether they are on a GPU."""


class Staging:
    """Copies checkpoints to host memory. Its buffers are kept for the next copy; those of a GPU's tensors are pinned.

    Args:
        limit: number of bytes that the buffers may need; None: a quarter of the free memory.
        processes: on this machine that copy at the same time, and share the quarter.
    """

    def __init__(self, limit: int | None = None, processes: int = 1) -> None:
        self._limit, self._processes = limit, processes
        self._bytes = 0
        self._kept: dict[_Kind, list[Tensor]] = {}
        self._free: dict[_Kind, list[Tensor]] = {}
        """Buffers of the last copy that this one has not used."""
        self._copies: dict[tuple[Any, ...], Tensor] = {}
        """Of this checkpoint, so that tied weights stay tied."""
        self._gpus: set[torch.device] = set()
        self._events: list[torch.cuda.Event] = []

    def copy(self, checkpoint: Checkpoint) -> Checkpoint | None:
        """Return a copy that is complete after `wait`; None if it needs too much memory. No device sync."""
        if self._limit is None:
            import psutil

            self._limit = psutil.virtual_memory().available // (4 * self._processes)
        self._free, self._kept = self._kept, {}
        try:
            with torch.no_grad():
                copied: Checkpoint = self._copied(checkpoint)
        except _TooLargeError:
            if self._limit > 0:
                log.info(
                    "a copy of the checkpoint needs more than %.1f GiB, a quarter of the free memory, so training waits"
                    " until checkpoints are written",
                    self._limit / 2**30,
                )
            self._limit = 0
            self.free()
            return None
        finally:
            self._copies.clear()
            self._bytes -= sum(buffer.nbytes for buffers in self._free.values() for buffer in buffers)
            self._free = {}
        self._events = [torch.cuda.current_stream(gpu).record_event() for gpu in self._gpus]
        return copied

    def wait(self) -> None:
        """Wait until the copies of a GPU's tensors have arrived."""
        for event in self._events:
            event.synchronize()

    def free(self) -> None:
        """Free all buffers."""
        self._kept, self._bytes = {}, 0

    def _copied(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return self._tensor(value)
        if isinstance(value, dict):
            items = copy(value)  # with the attributes of an OrderedDict: `_metadata` of a state dict
            for name, item in value.items():
                items[name] = self._copied(item)
            return items
        if type(value) in (list, tuple):
            return type(value)(self._copied(item) for item in value)
        return copy(value) if type(value) is set else value

    def _tensor(self, value: Tensor) -> Tensor:
        if type(value) is not Tensor or value.layout is not torch.strided or value.is_quantized or value.is_meta:
            return deepcopy(value.detach())
        place = (value.data_ptr(), value.dtype, value.shape, value.stride(), value.device)
        if place not in self._copies:
            kind = (value.dtype, value.shape, value.stride(), value.is_cuda)
            buffers = self._free.get(kind)
            buffer = buffers.pop() if buffers else self._new(value)
            self._kept.setdefault(kind, []).append(buffer)
            self._copies[place] = buffer.copy_(value, non_blocking=value.is_cuda)
            if value.is_cuda:
                self._gpus.add(value.device)
        return self._copies[place]

    def _new(self, value: Tensor) -> Tensor:
        self._bytes += value.nbytes
        if self._limit is not None and self._bytes > self._limit:
            raise _TooLargeError
        return torch.empty_like(value, device="cpu", pin_memory=value.is_cuda)
