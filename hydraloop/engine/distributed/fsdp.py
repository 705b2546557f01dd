"""FSDP2: shards a model (`shard`), and functions on tensors that may be sharded (DTensors).

A run that does not shard imports neither torch's FSDP nor its DTensor, which takes 0.5 s.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils import get_total_norm

from hydraloop.engine.device.model_preparation import WRAP, modules_of
from hydraloop.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from hydraloop.schemas.distributed import FSDPConf

# The model. ----------------------------------------------------------------------------------------------------------


def shard(model: nn.Module, options: FSDPConf, device: torch.device, autocast: torch.dtype | None) -> None:
    """Apply `fully_shard` to each module of the classes in `options.wrap`, then to the model, in place.

    Args:
        device: where the model is.
        autocast: the dtype of `param_dtype=auto`, but not for a model with batch normalisation, which needs float32.

    Raises:
        UserError: no module has one of the classes, or an unknown dtype.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    has_batch_norm = any(isinstance(module, nn.modules.batchnorm._NormBase) for module in model.modules())
    param_dtype = None if has_batch_norm else autocast
    is_auto = options.param_dtype == "auto"
    if not is_auto:
        param_dtype = _dtype(options.param_dtype, "distributed.fsdp.param_dtype")
    reduce_dtype = _dtype(options.reduce_dtype, "distributed.fsdp.reduce_dtype")
    policies: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (dist.get_world_size(),)),
        "reshard_after_forward": options.reshard_after_forward,
        # Autocast converts inputs where it computes in bf16, and leaves others (times, coordinates) in float32.
        "mp_policy": MixedPrecisionPolicy(param_dtype, reduce_dtype, cast_forward_inputs=not is_auto),
        "offload_policy": CPUOffloadPolicy() if options.offload else OffloadPolicy(),
    }
    blocks = modules_of(model, options.wrap, key=WRAP)
    for module in blocks:
        fully_shard(module, **policies)
    # Parameters outside of the blocks stay gathered, because backward begins with them.
    fully_shard(model, **{**policies, "reshard_after_forward": options.reshard_after_forward and not blocks})


def _dtype(name: str | None, key: str) -> torch.dtype | None:
    dtype = None if name is None else getattr(torch, name, None)
    if name is not None and not isinstance(dtype, torch.dtype):
        raise UserError(f"there is no dtype {name!r}", key=key, remedy="Use float32, bfloat16, float16 or null.")
    return dtype


def reshard(model: nn.Module) -> None:
    """Free gathered parameters, so that the next forward gathers them again: shards may have changed in place."""
    from torch.distributed.fsdp import FSDPModule

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def hosts_mesh(timeout: timedelta) -> DeviceMesh:
    """Return the mesh of all ranks' host memories, with a group of its own, for a thread that saves."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(dist.new_group(backend="gloo", timeout=timeout), "cpu")


# One tensor. ---------------------------------------------------------------------------------------------------------


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor, of which this rank has only a part. Imports no DTensor."""
    module = sys.modules.get("torch.distributed.tensor")  # without which there is no DTensor
    return module is not None and isinstance(value, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part, detached, in the same memory; of a plain tensor, the whole. No communication."""
    tensor = tensor.detach()
    return tensor.to_local() if is_sharded(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the full tensor, gathered from all ranks if it is sharded (then called on every rank)."""
    return tensor.full_tensor() if is_sharded(tensor) else tensor


def as_sharded(value: Any, target: Any) -> Any:
    """Shard a full tensor as `target` is, without communication; every rank has the full one, or its part of it.

    Return the value itself if the target is not sharded or has another shape: a step count, or a mismatch that loading
    will report.
    """
    if not is_sharded(target) or not isinstance(value, Tensor) or value.shape != target.shape:
        return value
    if is_sharded(value):  # as loaded from shards: split as the target is, in host memory
        return sharded_like(local(value), target)
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)


def part_of(value: Tensor, target: Tensor) -> Tensor:
    """Return this rank's part of a full tensor, split as `target` is. No communication."""
    return local(as_sharded(value, target)) if is_sharded(target) else value


def sharded_like(part: Tensor, target: Tensor) -> Tensor:
    """Return a tensor sharded as `target` is, with `part` as this rank's part; for a plain target, the part itself."""
    if not is_sharded(target):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
    )


# States and gradients. -----------------------------------------------------------------------------------------------


def shard_state(values: Mapping[str, Any], targets: Mapping[str, Any]) -> dict[str, Any]:
    """Shard each full tensor as the target of the same name is; every rank has the full ones."""
    return {name: as_sharded(value, targets.get(name)) for name, value in values.items()}


def largest_entry(tensors: Sequence[Tensor]) -> Tensor:
    """Return the infinity norm of all tensors together, a scalar on every rank; called on every rank. No host sync.

    torch's `get_total_norm` (2.13) fails for a rank's empty part, as with fewer rows than ranks.

    Returns:
        NaN if any entry is; 0 without entries. A DTensor if the tensors are, so that it can scale them.
    """
    if not tensors:
        return torch.zeros(())
    parts = [part for part in map(local, tensors) if part.numel()]
    first = next((tensor for tensor in tensors if is_sharded(tensor)), None)
    norm = get_total_norm(parts, torch.inf) if parts else tensors[0].new_zeros(())
    norm = local(norm).to(local(tensors[0]).device, torch.float32)
    if first is None:
        return norm
    from torch.distributed.tensor import DTensor, Replicate

    # Not every backend's maximum keeps a NaN, so it is sent as a second number.
    both = torch.stack([norm.nan_to_num(torch.inf, torch.inf), norm.isnan().float()])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=first.device_mesh.get_group())
    norm = torch.where(both[1] > 0, torch.nan, both[0])
    return DTensor.from_local(norm, first.device_mesh, [Replicate()], run_check=False)
