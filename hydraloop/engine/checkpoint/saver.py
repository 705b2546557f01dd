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
from hydraloop.engine.distributed.buckets import buckets
from hydraloop.engine.distributed.comm import Distributed, same_device
from hydraloop.engine.loss_check import not_finite
from hydraloop.errors import PeerError
from hydraloop.files import atomic
from hydraloop.files.checkpoint_files import point_to, remove, remove_old_shards, still_safe
from hydraloop.files.result import describe

log = logging.getLogger(__name__)


class Saver:
    """Writes one checkpoint at a time: on rank 0, with FSDP2 on every rank.

    `start` copies a checkpoint and writes the copy in a thread, or writes the checkpoint at once. `wait` waits for the
    thread, and tells all ranks whether the file was written.

    Args:
        distributed: the ranks.
        failed: called in the thread after an error that is not an `OSError`; `wait` then raises it.
        limit: number of bytes that copies may need; None: a quarter of the free memory.
    """

    def __init__(self, distributed: Distributed, failed: Callable[[], object], limit: int | None = None) -> None:
        self._distributed = distributed
        self._failed = failed
        self._writes = distributed.is_main or distributed.sharded
        self._staging = Staging(limit, distributed.local_world_size if distributed.sharded else 1)
        self._thread: ThreadPoolExecutor | None = None
        """Kept between saves: `Thread.start` would wait for the interpreter, 1.4 ms for each save."""
        # The current save.
        self._writing: Future[None] | None = None
        self._at_end: Callable[[bool], object] | None = None
        """Called at its end; None without a save."""
        self._written = False
        self._error: Exception | None = None
        """Why this rank could not write, unless it is an `OSError`."""

    def start(
        self,
        checkpoint: Checkpoint,
        write: Callable[[Checkpoint], bool],
        at_end: Callable[[bool], object],
        *,
        asynchronous: bool,
    ) -> bool:
        """Write a checkpoint; called on every rank, after `wait`.

        Args:
            checkpoint: may change after this call.
            write: writes it and returns whether it could; called on rank 0 (with FSDP2, on every rank), in a thread if
                asynchronous.
            at_end: called on every rank at the end of the save, with what `write` returned.
            asynchronous: return after the copy, unless it needs too much memory.

        Returns:
            Whether the file was written; True if a thread writes it.
        """
        self._at_end = at_end
        self._written = False
        self._error = None
        copied: Checkpoint | None = None
        try:
            if self._writes:
                check_loadable(checkpoint, "checkpoint")
                copied = self._staging.copy(checkpoint) if asynchronous else None
        except Exception as error:
            self._error = error

        # Ranks that write together wait for each other: none writes if one cannot, or in a thread if one has no copy.
        of_ranks = self._distributed.gather([self._error is None, copied is not None or not self._writes])
        can_write = all(is_ready for is_ready, _ in of_ranks)
        asynchronous = asynchronous and all(has_copy for _, has_copy in of_ranks)
        try:
            if self._writes and can_write:
                if asynchronous and copied is not None:
                    self._thread = self._thread or ThreadPoolExecutor(
                        1, thread_name_prefix="hydraloop-save", initializer=same_device()
                    )
                    self._writing = self._thread.submit(self._write_in_thread, copied, write)
                else:
                    self._written = write(checkpoint)
        except Exception as error:
            self._error = error
        return asynchronous or self.wait()

    def _write_in_thread(self, copied: Checkpoint, write: Callable[[Checkpoint], bool]) -> None:
        try:
            self._staging.wait()
            self._written = write(copied)
        except Exception as error:
            self._error = error
            self._failed()

    def wait(self) -> bool:
        """Wait for the thread; called on every rank. Return whether the last file was written; True without a save.

        Raises:
            PeerError: rank 0 has raised another error than an `OSError`.
        """
        if self._at_end is None:
            return True
        self._join()
        problem = None if self._error is None else describe(self._error)
        written, problem_of_main = self._distributed.from_main([self._written, problem])
        self._finish(written)
        if self._error is not None:
            raise self._error
        if problem_of_main is not None:
            raise PeerError(f"rank 0 could not write a checkpoint: {problem_of_main}")
        return bool(written)

    @property
    def is_writing(self) -> bool:
        """Whether the thread of this rank is writing."""
        return self._writing is not None and not self._writing.done()

    def close(self) -> None:
        """Free the buffers. After an error of the run, first wait for the thread, but not for the other ranks."""
        if self._at_end is not None:
            self._join()
            self._finish(self._written)
            if self._error is not None:
                log.error("a checkpoint could not be written: %s", describe(self._error), exc_info=self._error)
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._staging.free()

    def _join(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _finish(self, written: bool) -> None:
        assert self._at_end is not None
        at_end = self._at_end
        self._at_end = None
        at_end(written)


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


def stand_alone(checkpoint: Checkpoint, distributed: Distributed) -> Checkpoint:
    """Return what this rank writes, in plain tensors; called on every rank. With FSDP2, `shards` has its parts."""
    if not distributed.sharded:
        return checkpoint
    parts: shards.Parts = {}
    rest = shards.split(checkpoint, parts)
    return {**(rest if distributed.is_main else {}), "shards": parts}


def broken_weights(
    checkpoint: Checkpoint, buffers: Collection[str], averaging_hook: str | None, distributed: Distributed
) -> list[str]:
    """Return the names of the weights in a checkpoint that have NaN or infinity, raw or averaged, before it is written.

    Called on the ranks that write, maybe in a thread; they get the same names.

    Args:
        checkpoint: as `stand_alone` returns it.
        buffers: the names of the model's buffers, which may be infinite (a mask).
        averaging_hook: the name of the hook that has the averages; None: no hook.
        distributed: the ranks.
    """
    raw = checkpoint.get("state_dict", {})
    averaged = checkpoint.get("hooks", {}).get(averaging_hook, {}).get("averaged", {})
    broken: list[str] = []
    for label, prefix, entry in (
        ("", "state_dict/", raw),
        ("the average of ", f"hooks/{averaging_hook}/averaged/", averaged),
    ):
        weights = {**entry, **_shards(checkpoint, prefix)}
        tensors = {name: value for name, value in weights.items() if isinstance(value, Tensor) and name not in buffers}
        broken += [f"{label}{name}" for name in not_finite(tensors)]
    if distributed.mesh is None:
        return broken
    of_ranks: list[Any] = [None] * distributed.world_size
    dist.all_gather_object(of_ranks, broken, group=distributed.mesh.get_group())
    return list(dict.fromkeys(name for of_rank in of_ranks for name in of_rank))


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
    of_ranks = None
    try:
        # With FSDP2, the shards come first: the file, which names them, is complete if it exists.
        if distributed.mesh is not None:
            of_ranks = shards.write(path, checkpoint["shards"], distributed.mesh)
            if not distributed.is_main:
                return True
            checkpoint = {**checkpoint, "shards": of_ranks.text()}
        write(path, checkpoint)
        for link in links:
            if of_ranks is None:
                atomic.link(path, link)
            else:
                write(link, {**checkpoint, "shards": shards.link(of_ranks, link).text()})
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
