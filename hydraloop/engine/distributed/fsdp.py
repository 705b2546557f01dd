"""FSDP2: shards a model (`shard`), and functions on tensors that may be sharded (DTensors).

A run that does not shard imports neither torch's FSDP nor its DTensor, which takes 0.5 s.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hydraloop.engine.model_preparation import WRAP, modules_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

    from hydraloop.schemas.engine import FSDPConf

# The model. ----------------------------------------------------------------------------------------------------------


def shard(model: nn.Module, options: FSDPConf, device: torch.device, autocast: torch.dtype | None) -> None:
    """Apply `fully_shard` to each module of the classes in `options.wrap`, then to the model, in place.

    Args:
        device: where the model is.
        autocast: the dtype of `param_dtype=auto`, but not for a model with batch normalisation, which needs float32.

    Raises:
        UserError: no module has one of the classes.
        AttributeError: torch has no such dtype.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    has_batch_norm = any(isinstance(module, nn.modules.batchnorm._NormBase) for module in model.modules())
    param_dtype = None if has_batch_norm else autocast
    is_auto = options.param_dtype == "auto"
    if not is_auto:
        param_dtype = _dtype(options.param_dtype)
    reduce_dtype = _dtype(options.reduce_dtype)
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


def _dtype(name: str | None) -> torch.dtype | None:
    dtype: torch.dtype | None = None if name is None else getattr(torch, name)
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


# Tensors. ------------------------------------------------------------------------------------------------------------


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


def shard_state(values: Mapping[str, Any], targets: Mapping[str, Any]) -> dict[str, Any]:
    """Shard each full tensor as the target of the same name is; every rank has the full ones."""
    return {name: as_sharded(value, targets.get(name)) for name, value in values.items()}
