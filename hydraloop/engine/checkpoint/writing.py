"""Writes the file of a checkpoint, on rank 0; with FSDP2, each rank writes its shard."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from hydraloop.engine.checkpoint import shards
from hydraloop.engine.checkpoint.format import Checkpoint, write
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.run_files.checkpoint_files import point_to, remove, remove_old_shards, still_safe

log = logging.getLogger(__name__)


def stand_alone(checkpoint: Checkpoint, distributed: Distributed) -> Checkpoint:
    """Return what this rank writes, in plain tensors; called on every rank. With FSDP2, `shards` has its parts."""
    if not distributed.sharded:
        return checkpoint
    parts: shards.Parts = {}
    rest = shards.split(checkpoint, parts)
    return {**(rest if distributed.is_main else {}), "shards": parts}


def write_file(
    path: Path, checkpoint: Checkpoint, distributed: Distributed, *, last: bool, delete: Sequence[Path]
) -> bool:
    """Write a file, maybe in a thread; then delete others. Called on rank 0; with FSDP2, on every rank.

    Args:
        checkpoint: as `stand_alone` returns it.
        last: whether `resume=auto` and restarts continue from it.
        delete: files that are not needed once it is written.

    Returns:
        Whether it was written. If the disk is full or the folder is read-only, a warning says what is still safe.
    """
    try:
        if distributed.mesh is not None:
            entry = shards.write(path, checkpoint["shards"], distributed.mesh)
            if not distributed.is_main:
                return True
            checkpoint = {**checkpoint, "shards": entry}
        write(path, checkpoint)
        if last:
            point_to(path)
    except OSError as full:
        log.warning(
            "%s could not be written: %s; %s. Training continues, and the next save is tried.",
            path, full.strerror or full, still_safe(path.parent),
        )  # fmt: skip
        return False
    remove_old_shards(path)
    for file in delete:
        remove(file)
    return True
