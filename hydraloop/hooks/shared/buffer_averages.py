"""Average tensors over all ranks in place: buffers, which each rank computes from its own batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.fsdp import local
from hydraloop.engine.hook import Hook


def with_averages(tensors: Iterable[Tensor], hooks: Mapping[str, Hook]) -> Iterator[Tensor]:
    """Yield each of the model's tensors, followed by its averages in hooks with `average_of` (as `ema` has): evaluation
    may use those.

    Means over updates and over ranks commute, so the order of the hooks does not matter.
    """
    averages_of = [hook.average_of for hook in hooks.values() if hasattr(hook, "average_of")]
    for tensor in tensors:
        yield tensor
        yield from (average for average_of in averages_of if (average := average_of(tensor)) is not None)


@torch.no_grad()
def average_over_ranks(tensors: Iterable[Tensor], ranks: Distributed) -> None:
    """Replace each tensor by its mean over all ranks; called on every rank with the same tensors. No host sync.

    One all-reduce per device, in float64: values that are equal on all ranks stay identical (in types shorter than
    float64), and means of integers are exact, then rounded. Boolean tensors do not change. With one rank, this does
    nothing.
    """
    if ranks.world_size == 1:
        return
    by_device: dict[torch.device, list[Tensor]] = {}
    for tensor in tensors:
        if tensor.dtype != torch.bool and tensor.numel():
            part = local(tensor)
            by_device.setdefault(part.device, []).append(torch.view_as_real(part) if part.is_complex() else part)
    for parts in by_device.values():
        means = ranks.sum(torch.cat([part.flatten().double() for part in parts])) / ranks.world_size
        for part, mean in zip(parts, torch.split(means, [part.numel() for part in parts]), strict=True):
            part.copy_((mean if part.is_floating_point() else mean.round()).view_as(part))
