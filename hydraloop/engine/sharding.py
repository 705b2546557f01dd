"""FSDP2: the model in shards, and tensors in shards as the rest of hydraloop sees them. Imported by runs that shard."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from hydraloop.engine.modules import WRAP, modules_of
from hydraloop.errors import UserError

if TYPE_CHECKING:
    from hydraloop.engine.ranks import Sharding


def shard(model: nn.Module, options: Sharding, device: torch.device, dtype: torch.dtype | None) -> None:
    """`fully_shard` each module of the classes in `options.wrap`, then the model as a whole, in place.

    Args:
        device: where the model is.
        dtype: parameters are gathered in it; None: in their own.

    Raises:
        UserError: no module is of one of the classes, or there is no such `reduce_dtype`.
    """
    if options.offload and device.type == "cpu":
        raise UserError(
            "the shards are in host memory already, on a CPU", key="distributed.fsdp.offload", remedy="Set it to false."
        )
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    reduce_dtype = None if options.reduce_dtype is None else getattr(torch, options.reduce_dtype, None)
    if options.reduce_dtype is not None and not isinstance(reduce_dtype, torch.dtype):
        raise UserError(
            f"there is no dtype {options.reduce_dtype!r}",
            key="distributed.fsdp.reduce_dtype",
            remedy="Use float32, bfloat16, or null.",
        )
    policies: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": options.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype),
        "offload_policy": CPUOffloadPolicy() if options.offload else OffloadPolicy(),
    }
    blocks = modules_of(model, options.wrap, key=WRAP)
    for module in blocks:
        fully_shard(module, **policies)
    # What is left outside of the blocks is needed again at once in backward.
    fully_shard(model, **{**policies, "reshard_after_forward": options.reshard_after_forward and not blocks})


def local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor (the same memory); a plain tensor is itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """The full tensor, gathered; called on every rank."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def forget_gathered(model: nn.Module) -> None:
    """Let the next forward gather all parameters anew: their shards may have changed in place."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def like(values: Mapping[str, Any], targets: Mapping[str, Any]) -> dict[str, Any]:
    """`values` with each full tensor sharded as the target of its name is; every rank has the full ones."""
    return {name: as_sharded(value, targets.get(name)) for name, value in values.items()}


def as_sharded(value: Any, target: Any) -> Any:
    """A full tensor sharded as `target` is, where that is sharded and of the same shape; else the value as it is."""
    if isinstance(value, DTensor) or not isinstance(target, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != target.shape:  # a state beside the parameter (a step count), or a misfit that loading will name
        return value
    return distribute_tensor(value.to(target.device), target.device_mesh, target.placements, src_data_rank=None)


def sharded_optimizer_state(state: dict[str, Any], optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """An optimizer's saved state with full tensors, sharded as the parameters are."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    entries = {
        index: {name: as_sharded(value, parameters[index]) for name, value in entry.items()}
        if isinstance(index, int) and index < len(parameters)
        else entry
        for index, entry in state["state"].items()
    }
    return {**state, "state": entries}


def full(value: Any, *, keep: bool) -> Any:
    """A nested value with every DTensor gathered, on the CPU; called on every rank, in the same order.

    Args:
        keep: False: the rank only takes part; what it gets back is not to be used (memory for one tensor at a time).
    """
    if isinstance(value, DTensor):
        gathered = value.full_tensor()
        return gathered.cpu() if keep else None
    if isinstance(value, dict):
        items = {name: full(item, keep=keep) for name, item in value.items()}
        return items if type(value) is dict else type(value)(items)  # an OrderedDict, a Counter
    if isinstance(value, list | tuple):
        return type(value)(full(item, keep=keep) for item in value)
    return value


def sharded_like(part: Tensor, target: Tensor) -> Tensor:
    """This rank's part (`local`) as a tensor sharded as `target` is; of a plain target the part itself."""
    if not isinstance(target, DTensor):
        return part
    return DTensor.from_local(
        part, target.device_mesh, target.placements, run_check=False, shape=target.shape, stride=target.stride()
    )
