"""Saver: writes one checkpoint at a time, in a thread from a copy, while training continues.

Rank 0 writes the file; with FSDP2, each rank writes its shard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy, deepcopy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hydraloop.engine.checkpoint import shards
from hydraloop.engine.checkpoint.format import Checkpoint, check_loadable, write
from hydraloop.engine.checkpoint.shards import with_replaced
from hydraloop.engine.distributed.comm import Distributed, same_device
from hydraloop.engine.distributed.ddp import buckets
from hydraloop.engine.loss_check import not_finite
from hydraloop.errors import PeerError
from hydraloop.files import atomic
from hydraloop.files.checkpoint_files import point_to, remove, remove_old_shards, still_safe
from hydraloop.files.result import describe

log = logging.getLogger(__name__)


class Saver:
    """Writes the checkpoints of an engine on rank 0, with FSDP2 on every rank. All ranks wait for a save together.

    Args:
        failed: called in the thread after an error that is not an `OSError`; `wait` then raises it.
        limit: number of bytes that copies may need; None: a quarter of the free memory.
    """

    def __init__(self, distributed: Distributed, failed: Callable[[], object], limit: int | None = None) -> None:
        self._distributed, self._failed = distributed, failed
        self._staging = Staging(limit, distributed.local_world_size if distributed.sharded else 1)
        self._thread: ThreadPoolExecutor | None = None
        """Kept between saves: `Thread.start` would wait for the interpreter, 1.4 ms for each save."""
        self._writing: Future[None] | None = None
        self._done: Callable[[bool], object] | None = None
        """Called at the end of the current save; None without one."""
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
        """Write a checkpoint; called on every rank, after `wait`.

        Args:
            checkpoint: may change after this call.
            write: writes it and returns whether it could; called on rank 0 (with FSDP2, on every rank), in a thread if
                asynchronous.
            done: called on every rank at the end of the save, with what `write` returned.
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
        return asynchronous or self.wait()

    def _write(self, copied: Checkpoint, write: Callable[[Checkpoint], bool]) -> None:
        try:
            self._staging.wait()
            self._outcome = write(copied)
        except Exception as error:
            self._outcome = error
            self._failed()

    def wait(self) -> bool:
        """Wait for the thread; called on every rank. Return whether the last file was written; True without a save.

        Raises:
            PeerError: rank 0 has raised another error than an `OSError`.
        """
        if self._done is None:
            return True
        outcome = self._join()
        told = self._distributed.from_main(describe(outcome) if isinstance(outcome, Exception) else outcome)
        self._finish(told is True)
        if isinstance(outcome, Exception):
            raise outcome
        if isinstance(told, str):
            raise PeerError(f"rank 0 could not write a checkpoint: {told}")
        return bool(told)

    def close(self) -> None:
        """Free the buffers. After an error of the run, first wait for the thread, but not for the other ranks."""
        if self._done is not None:
            outcome = self._join()
            self._finish(outcome is True)
            if isinstance(outcome, Exception):
                log.error("a checkpoint could not be written: %s", describe(outcome), exc_info=outcome)
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._staging.free()

    def _join(self) -> bool | Exception:
        if self._writing is not None:
            self._writing.result()
            self._writing = None
        return self._outcome

    def _finish(self, written: bool) -> None:
        done, self._done = self._done, None
        assert done is not None
        done(written)


_Kind = tuple[torch.dtype, torch.Size, tuple[int, ...], torch.device]
"""What a tensor and its buffer have in common: type, shape, strides, and the device of the tensor."""
_Place = tuple[int, _Kind]
"""Where a tensor is, and its kind. Tied weights have the same."""


class Staging:
    """Copies checkpoints to host memory. Its memory is kept for the next copy; that of a GPU's tensors is pinned.

    Args:
        limit: number of bytes that the buffers may need; None: a quarter of the free memory.
        processes: on this machine that copy at the same time, and share the quarter.
    """

    def __init__(self, limit: int | None = None, processes: int = 1) -> None:
        self._limit, self._processes = limit, processes
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
            self._kinds, self._buffers = kinds, _allocated(list(tensors.values()))
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
        if size > self._limit > 0:
            log.info(
                "a copy of the checkpoint needs more than %.1f GiB, a quarter of the free memory, so training waits"
                " until checkpoints are written",
                self._limit / 2**30,
            )
            self._limit = 0
        return size <= self._limit

    def wait(self) -> None:
        """Wait until the copies of a GPU's tensors have arrived."""
        for event in self._events:
            event.synchronize()

    def free(self) -> None:
        """Free all buffers."""
        self._kinds, self._buffers = [], []


def _place(value: Tensor) -> _Place:
    return value.data_ptr(), (value.dtype, value.shape, value.stride(), value.device)


def _with_tensors(checkpoint: Checkpoint, replace: Callable[[Tensor], Tensor]) -> Checkpoint:
    """Return a copy with other tensors. Tensors that are not plain (sparse) are copied where they are."""

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
    found: dict[int, Tensor] = {}
    for bucket in buckets(tensors):
        size = sum(tensor.nbytes for tensor in bucket)
        memory = torch.empty(size, dtype=torch.uint8, pin_memory=bucket[0].is_cuda).untyped_storage()
        start = 0
        for tensor in bucket:
            like = torch.empty_like(tensor, device="meta")  # strides without the gaps of a view
            part = memory[start : start + tensor.nbytes]
            found[id(tensor)] = torch.empty(0, dtype=tensor.dtype).set_(part, 0, like.shape, like.stride())
            start += tensor.nbytes
    return [found[id(tensor)] for tensor in tensors]


def stand_alone(checkpoint: Checkpoint, distributed: Distributed) -> Checkpoint:
    """Return what this rank writes, in plain tensors; called on every rank. With FSDP2, `shards` has its parts."""
    if not distributed.sharded:
        return checkpoint
    parts: shards.Parts = {}
    rest = shards.split(checkpoint, parts)
    return {**(rest if distributed.is_main else {}), "shards": parts}


def broken_weights(
    checkpoint: Checkpoint, buffers: Collection[str], holder: str | None, distributed: Distributed
) -> list[str]:
    """Return the names of the weights in a checkpoint that have NaN or infinity, raw or averaged, before it is written.

    Called on the ranks that write, maybe in a thread; they get the same names.

    Args:
        checkpoint: as `stand_alone` returns it.
        buffers: the names of the model's buffers, which may be infinite (a mask).
        holder: the name of the hook that has the averages; None: no hook.
        distributed: the ranks.
    """
    raw = checkpoint.get("state_dict", {})
    averaged = checkpoint.get("hooks", {}).get(holder, {}).get("averaged", {})
    found: list[str] = []
    for label, prefix, entry in (("", "state_dict/", raw), ("the average of ", f"hooks/{holder}/averaged/", averaged)):
        weights = {**entry, **_shards(checkpoint, prefix)}
        tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor) and name not in buffers}
        found += [f"{label}{name}" for name in not_finite(tensors)]
    if distributed.mesh is None:
        return found
    told: list[Any] = [None] * distributed.world_size
    dist.all_gather_object(told, found, group=distributed.mesh.get_group())
    return list(dict.fromkeys(name for of_rank in told for name in of_rank))


def _shards(checkpoint: Checkpoint, prefix: str) -> dict[str, Tensor]:
    """Return this rank's parts of the sharded tensors whose path begins with the prefix, by the rest of the path."""
    parts: shards.Parts = checkpoint.get("shards", {})
    return {path.removeprefix(prefix): part for path, (part, _) in parts.items() if path.startswith(prefix)}


def write_file(
    path: Path,
    checkpoint: Checkpoint,
    distributed: Distributed,
    *,
    links: Sequence[Path] = (),
    last: bool,
    delete: Sequence[Path],
) -> bool:
    """Write a file, maybe in a thread; then delete others. Called on rank 0; with FSDP2, on every rank.

    Args:
        checkpoint: as `stand_alone` returns it.
        links: other names of the file.
        last: whether `resume=auto` and restarts continue from it.
        delete: files that are not needed once it is written.

    Returns:
        Whether it was written. If the disk is full or the folder is read-only, a warning says what is still safe.
    """
    written = None
    try:
        if distributed.mesh is not None:
            written = shards.write(path, checkpoint["shards"], distributed.mesh)
            if not distributed.is_main:
                return True
            checkpoint = {**checkpoint, "shards": written.text()}
        write(path, checkpoint)
        for other in links:
            if written is None:
                atomic.link(path, other)
            else:
                write(other, {**checkpoint, "shards": shards.link(written, other).text()})
        if last:
            point_to(path)
    except OSError as full:
        log.warning(
            "%s could not be written: %s; %s. Training continues, and the next save is tried.",
            path, full.strerror or full, still_safe(path.parent),
        )  # fmt: skip
        return False
    for file in (path, *links):
        remove_old_shards(file)
    for file in delete:
        remove(file)
    return True
