"""FSDP2: the model in shards, and tensors in shards as the rest of hydraloop sees them. Imported by runs that shard."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor
from torch.nn.utils import get_total_norm

from hydraloop.engine.device.model_preparation import WRAP, modules_of
from hydraloop.errors import UserError

if TYPE_CHECKING:
    from hydraloop.engine.distributed.process_group import Sharding


def shard(model: nn.Module, options: Sharding, device: torch.device) -> None:
    """`fully_shard` each module of the classes in `options.wrap`, then the model as a whole, in place.

    Args:
        device: where the model is.

    Raises:
        UserError: no module is of one of the classes, or there is no such dtype.
    """
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    dtypes: dict[str, Any] = {
        name: _dtype(getattr(options, name), f"distributed.fsdp.{name}") for name in ("param_dtype", "reduce_dtype")
    }
    policies: dict[str, Any] = {
        "mesh": mesh,
        "reshard_after_forward": options.reshard_after_forward,
        "mp_policy": MixedPrecisionPolicy(**dtypes),
        "offload_policy": CPUOffloadPolicy() if options.offload else OffloadPolicy(),
    }
    blocks = modules_of(model, options.wrap, key=WRAP)
    for module in blocks:
        fully_shard(module, **policies)
    # What is left outside of the blocks is needed again at once in backward.
    fully_shard(model, **{**policies, "reshard_after_forward": options.reshard_after_forward and not blocks})


def _dtype(name: str | None, key: str) -> torch.dtype | None:
    dtype = None if name is None else getattr(torch, name, None)
    if name is not None and not isinstance(dtype, torch.dtype):
        raise UserError(f"there is no dtype {name!r}", key=key, remedy="Use float32, bfloat16, float16 or null.")
    return dtype


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


def largest_entry(tensors: Sequence[Tensor]) -> Tensor:
    """The infinity norm of all tensors together, a scalar that every rank has; called on every rank. No host sync.

    torch's `get_total_norm` (2.13) has no such norm of a rank's part that is empty, as with fewer rows than ranks.

    Returns:
        NaN where any entry is; 0 without entries. A DTensor where the tensors are some, so that it can scale them.
    """
    if not tensors:
        return torch.zeros(())
    parts = [part.detach() for part in map(local, tensors) if part.numel()]
    first = next((tensor for tensor in tensors if isinstance(tensor, DTensor)), None)
    norm = get_total_norm(parts, torch.inf) if parts else tensors[0].new_zeros(())
    norm = local(norm).to(local(tensors[0]).device, torch.float32)
    if first is None:
        return norm
    # Whether a maximum keeps a NaN is the backend's choice; as a number of its own it arrives.
    both = torch.stack([norm.nan_to_num(torch.inf, torch.inf), norm.isnan().float()])
    dist.all_reduce(both, dist.ReduceOp.MAX, group=first.device_mesh.get_group())
    norm = torch.where(both[1] > 0, torch.nan, both[0])
    return DTensor.from_local(norm, first.device_mesh, [Replicate()], run_check=False)
