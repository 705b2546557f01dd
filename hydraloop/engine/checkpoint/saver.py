"""Saver: writes one checkpoint at a time, in a thread from a copy, while training continues.

Rank 0 writes the file. With FSDP2, each rank writes its shard.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hydraloop.engine.checkpoint import shards
from hydraloop.engine.checkpoint.format import Checkpoint, check_loadable, write
from hydraloop.engine.checkpoint.staging import Staging
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
        failed: called in the thread if the file was not written; requests that all ranks call `wait`.
        limit: bytes that a copy may need; None: a quarter of the free memory.
    """

    def __init__(self, distributed: Distributed, failed: Callable[[], object], limit: int | None = None) -> None:
        self._distributed = distributed
        self._failed = failed
        self._writes = distributed.is_main or distributed.sharded
        """Whether this rank writes anything."""
        self._staging = Staging(limit, distributed.local_world_size if distributed.sharded else 1)
        self._thread: ThreadPoolExecutor | None = None
        """Kept between saves: `Thread.start` would wait for the interpreter, 1.4 ms for each save."""
        # The current save.
        self._writing: Future[None] | None = None
        """Writes the copy in the thread; None if no thread writes."""
        self._at_end: Callable[[bool], object] | None = None
        """Called once, at the end of the save, with whether the file was written; None: no save runs."""
        self._written = False
        """Whether this rank has written its file."""
        self._error: Exception | None = None
        """Why this rank could not write; None also after an `OSError`, which is a warning."""

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
            at_end: called on every rank at the end of the save, with what `write` returned on rank 0.
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

        # Ranks that write together wait for each other. If one rank cannot write, none does. If one rank has no copy,
        # all write synchronously.
        of_ranks = self._distributed.gather([self._error is None, copied is not None or not self._writes])
        can_write = all(is_ready for is_ready, _ in of_ranks)
        asynchronous = asynchronous and all(has_copy for _, has_copy in of_ranks)

        if self._writes and can_write:
            if asynchronous and copied is not None:
                if self._thread is None:
                    self._thread = ThreadPoolExecutor(1, thread_name_prefix="hydraloop-save", initializer=same_device())
                self._writing = self._thread.submit(self._write_in_thread, copied, write)
            else:
                try:
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
        if not self._written:
            self._failed()

    @property
    def is_writing(self) -> bool:
        """Whether the thread of this rank is writing."""
        return self._writing is not None and not self._writing.done()

    def wait(self) -> bool:
        """Wait for the thread; called on every rank. Return whether the last file was written; True without a save.

        Raises:
            Exception: why this rank could not write, unless it is an `OSError`.
            PeerError: rank 0 could not write, for a reason that is not an `OSError`.
        """
        if self._at_end is None:
            return True
        self._wait_for_thread()
        problem = None if self._error is None else describe(self._error)
        written, problem_of_main = self._distributed.from_main([self._written, problem])
        self._end(written)
        if self._error is not None:
            raise self._error
        if problem_of_main is not None:
            raise PeerError(f"rank 0 could not write a checkpoint: {problem_of_main}")
        return bool(written)

    def close(self) -> None:
        """Free the buffers. After an error of the run, first wait for the thread, but not for the other ranks."""
        if self._at_end is not None:
            self._wait_for_thread()
            self._end(self._written)
            if self._error is not None:
                log.error("a checkpoint could not be written: %s", describe(self._error), exc_info=self._error)
        if self._thread is not None:
            self._thread.shutdown()
            self._thread = None
        self._staging.free()

    def _wait_for_thread(self) -> None:
        if self._writing is not None:
            self._writing.result()
            self._writing = None

    def _end(self, written: bool) -> None:
        """End the save. `at_end` is called once, also if it raises an error."""
        assert self._at_end is not None
        at_end = self._at_end
        self._at_end = None
        at_end(written)


def part_of_this_rank(checkpoint: Checkpoint, distributed: Distributed) -> Checkpoint:
    """Return what this rank writes, in plain tensors; called on every rank.

    With FSDP2, the entry `shards` has this rank's parts, and only rank 0 has the other entries.
    """
    if not distributed.sharded:
        return checkpoint
    parts: shards.Parts = {}
    rest = shards.split(checkpoint, parts)
    return {**(rest if distributed.is_main else {}), "shards": parts}


def broken_weights(
    checkpoint: Checkpoint, buffers: Collection[str], averaging_hook: str | None, distributed: Distributed
) -> list[str]:
    """Return the names of the weights in a checkpoint, raw or averaged, that have NaN or infinity.

    Called before the checkpoint is written, on the ranks that write it, maybe in a thread. All get the same names.

    Args:
        checkpoint: as `part_of_this_rank` returns it.
        buffers: the names of the model's buffers, which may be infinite (a mask).
        averaging_hook: the name of the hook that has the averages; None: no hook.
        distributed: the ranks.
    """
    raw = checkpoint.get("state_dict", {})
    averaged = checkpoint.get("hooks", {}).get(averaging_hook, {}).get("averaged", {})
    tensors = {
        f"{label}{name}": value
        for label, prefix, entry in (
            ("", "state_dict/", raw),
            ("the average of ", f"hooks/{averaging_hook}/averaged/", averaged),
        )
        for name, value in {**entry, **_shards(checkpoint, prefix)}.items()
        if isinstance(value, Tensor) and name not in buffers
    }
    broken = not_finite(tensors)
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
    resume_from_it: bool,
    delete: Sequence[Path],
) -> bool:
    """Write a file, maybe in a thread; then delete others. Called on rank 0; with FSDP2, on every rank.

    Args:
        checkpoint: as `part_of_this_rank` returns it.
        links: other names of the file.
        resume_from_it: whether `resume=auto` and restarts continue from it.
        delete: files that are not needed once it is written.

    Returns:
        Whether it was written. If the disk is full or the folder is read-only, a warning says what is still safe.
    """
    shards_of_ranks = None
    try:
        # With FSDP2, the shards come first: the file, which names them, is complete if it exists.
        if distributed.mesh is not None:
            shards_of_ranks = shards.write(path, checkpoint["shards"], distributed.mesh)
            if not distributed.is_main:
                return True
            checkpoint = {**checkpoint, "shards": shards_of_ranks.text()}
        write(path, checkpoint, flush_folder=not resume_from_it)  # `point_to` flushes it
        for link in links:
            if shards_of_ranks is None:
                atomic.link(path, link)
            else:
                write(link, {**checkpoint, "shards": shards.link(shards_of_ranks, link).text()})
        if resume_from_it:
            point_to(path)
        written = True
    except OSError as full:
        log.warning(
            "%s could not be written: %s; %s. Training continues, and the next save is tried.",
            path, full.strerror or full, still_safe(path.parent),
        )  # fmt: skip
        delete = ()
        written = False
    if distributed.is_main:
        for file in (path, *links):
            with suppress(OSError):  # of a failing disk, after a warning
                remove_old_shards(file)  # shards that no file names: of an earlier or an unwritten file of this name
        for file in delete:
            with suppress(OSError):  # the next save tries again
                remove(file)
    return written
