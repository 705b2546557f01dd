"""Tensors that may be in shards (FSDP2), as hooks see them; without importing FSDP2 where there are none."""

from __future__ import annotations

from torch import Tensor, nn

_PLAIN = (Tensor, nn.Parameter, nn.Buffer)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, detached, in the same memory; of a plain tensor all of it. No communication."""
    return tensor.detach() if type(tensor) in _PLAIN else _dtensor(tensor)


def is_sharded(tensor: Tensor) -> bool:
    """Whether this rank has only a part of it."""
    return type(tensor) not in _PLAIN


def _dtensor(tensor: Tensor) -> Tensor:
    from hydraloop.engine.distributed import fsdp as sharding

    return sharding.local(tensor.detach())


def whole(tensor: Tensor) -> Tensor:
    """The whole tensor, gathered from all ranks where it is in shards (called on every rank then)."""
    if type(tensor) in _PLAIN:
        return tensor
    from hydraloop.engine.distributed import fsdp as sharding

    return sharding.whole(tensor)


def sharded_like(part: Tensor, target: Tensor) -> Tensor:
    """A tensor in shards as `target` is, of which `part` is this rank's; of a plain target the part itself."""
    if type(target) in _PLAIN:
        return part
    from hydraloop.engine.distributed import fsdp as sharding

    return sharding.sharded_like(part, target)


def part_of(value: Tensor, target: Tensor) -> Tensor:
    """Of a whole tensor the part this rank has of `target`; no communication."""
    if type(target) in _PLAIN:
        return value
    from hydraloop.engine.distributed import fsdp as sharding

    return sharding.local(sharding.as_sharded(value, target))
