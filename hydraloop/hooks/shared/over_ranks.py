"""The mean of tensors over all ranks, in place: of buffers, which each rank has computed on its own batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import local
from hydraloop.engine.hook import Hook


@runtime_checkable
class HasAverages(Protocol):
    """A hook that keeps averages of the model's tensors, and evaluates on them, as `ema` does."""

    def average_of(self, tensor: Tensor) -> Tensor | None:
        """The average of one of the model's tensors, to be changed in place; None where there is none (yet)."""


def with_averages(tensors: Iterable[Tensor], hooks: Mapping[str, Hook]) -> Iterator[Tensor]:
    """Each of the model's tensors, and behind it what the hooks have averaged of it: evaluation may run on that.

    A mean over updates and a mean over ranks can be taken in either order, so it does not matter either which of the
    hooks comes first.
    """
    averaging = [hook for hook in hooks.values() if isinstance(hook, HasAverages)]
    for tensor in tensors:
        yield tensor
        yield from (average for hook in averaging if (average := hook.average_of(tensor)) is not None)


@torch.no_grad()
def average_over_ranks(tensors: Iterable[Tensor], ranks: Distributed) -> None:
    """Put the mean over all ranks into each tensor; called on every rank, with the same tensors. No host sync.

    One all-reduce for all tensors of a device, in float64: what is equal on all ranks stays as it is to the last bit
    (anything shorter than float64, that is), and means of integers are exact. Of integers the mean is rounded; boolean
    tensors stay as they are.
    """
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.dtype != torch.bool and tensor.numel():
            part = local(tensor)
            by_device.setdefault(part.device, []).append(torch.view_as_real(part) if part.is_complex() else part)
    for parts in by_device.values():
        means = ranks.sum(torch.cat([part.flatten().double() for part in parts])) / ranks.world_size
        for part, mean in zip(parts, torch.split(means, [part.numel() for part in parts]), strict=True):
            part.copy_((mean if part.is_floating_point() else mean.round()).view_as(part))
