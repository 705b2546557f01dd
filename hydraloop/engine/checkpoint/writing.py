"""Writes the file of a checkpoint, on rank 0; with FSDP2, each rank writes its shard."""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from hydraloop.engine.checkpoint import shards
from hydraloop.engine.checkpoint.format import Checkpoint, write
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loss_check import not_finite
from hydraloop.run_files import atomic
from hydraloop.run_files.checkpoint_files import point_to, remove, remove_old_shards, still_safe

log = logging.getLogger(__name__)


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
