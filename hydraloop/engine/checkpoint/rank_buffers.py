"""Buffers that differ between the ranks, such as statistics of batch normalisation: saved for each rank.

`state_dict`, `task` and the averages of a hook are those of rank 0. Other ranks have other buffers if they compute them
from their own batches. A run that is resumed on as many ranks continues with those of each rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from hydraloop.engine.distributed.fsdp import is_sharded
from hydraloop.engine.run_parts import Run


def checksums(run: Run) -> dict[str, int]:
    """Return a number for each buffer in checkpoints, by its name in the task; nothing for a single process.

    One copy to the host for each buffer.
    """
    if run.ranks.world_size == 1:
        return {}
    return {name: zlib.crc32(_bytes(buffer)) for name, buffer in _buffers(run).items()}


def differing(of_ranks: Sequence[Mapping[str, int]]) -> list[str]:
    """Return the names of the buffers whose checksums are not the same on all ranks."""
    return [name for name, first in of_ranks[0].items() if any(one.get(name) != first for one in of_ranks)]


def values(run: Run, names: Collection[str]) -> dict[str, Tensor]:
    """Return copies of this rank's buffers on the CPU; nothing on rank 0, whose buffers are in other entries."""
    if run.ranks.is_main:
        return {}
    return {name: buffer.detach().cpu() for name, buffer in _buffers(run).items() if name in names}


@torch.no_grad()
def load(run: Run, of_ranks: Sequence[Mapping[str, Tensor]]) -> None:
    """Give this rank the buffers that it had. Another number of ranks keeps those of rank 0, which were loaded before.

    Args:
        run: its parts; the averages of hooks are loaded already.
        of_ranks: what `values` returned on each rank.
    """
    if len(of_ranks) == run.ranks.world_size:
        buffers = _buffers(run)
        for name, value in of_ranks[run.ranks.rank].items():
            if name in buffers:
                buffers[name].copy_(value)


def _buffers(run: Run) -> dict[str, Tensor]:
    """Return the buffers of the task and of its model that checkpoints have, and their averages in hooks."""
    found = {
        name: value
        for name, value in run.task.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) and not is_sharded(value)
    }
    averages_of = {name: hook.average_of for name, hook in run.hooks.items() if hasattr(hook, "average_of")}
    averages = {
        f"hooks/{hook}/{name}": average
        for hook, average_of in averages_of.items()
        for name, value in found.items()
        if (average := average_of(value)) is not None
    }
    return {name: value for name, value in {**found, **averages}.items() if value.layout is torch.strided}


def _bytes(buffer: Tensor) -> bytes:
    return buffer.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
