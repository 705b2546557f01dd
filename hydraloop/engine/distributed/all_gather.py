"""All-gather with gradients; torch's own is private since 2.13."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor


def gathered(values: Tensor) -> Tensor:
    """Return the values `[N, …]` of all ranks as `[ranks * N, …]`: `Distributed.all_gather`."""
    return cast(Tensor, _AllGather.apply(values))  # type: ignore[no-untyped-call]  # torch has no types for it


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, values.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]
