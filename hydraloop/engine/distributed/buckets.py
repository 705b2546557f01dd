"""Collectives over many tensors at once, in buckets, and a gather through which gradients flow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor

LIMIT = 250 * 2**20
"""Bytes of a bucket: 250 MiB, as when DDP starts. More would need more memory, and save no time."""


def buckets(tensors: Iterable[Tensor]) -> Iterator[list[Tensor]]:
    """Yield lists of tensors of one dtype and device, of at most 250 MiB each. A larger tensor is in a list alone."""
    by_kind: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for of_kind in by_kind.values():
        bucket, size = [of_kind[0]], of_kind[0].nbytes
        for tensor in of_kind[1:]:
            if size + tensor.nbytes > LIMIT:
                yield bucket
                bucket, size = [], 0
            bucket.append(tensor)
            size += tensor.nbytes
        yield bucket


def in_buckets(tensors: Iterable[Tensor], communicate: Callable[[Tensor], object]) -> None:
    """Call `communicate` with each bucket as one flat tensor `[N]`, which it changes; copy the values back.

    Args:
        tensors: detached; changed in place. In the same order on all ranks.
    """
    for bucket in buckets(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        communicate(flat)
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        torch._foreach_copy_(bucket, [part.view_as(tensor) for part, tensor in zip(parts, bucket, strict=True)])


def broadcast(tensors: Iterable[Tensor]) -> None:
    """Copy rank 0's tensors to all ranks, in place: one broadcast for each bucket. No host sync."""
    in_buckets([tensor.detach() for tensor in tensors], lambda flat: dist.broadcast(flat, 0))


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
