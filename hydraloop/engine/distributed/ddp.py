"""DDP: wraps the task in `DistributedDataParallel`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hydraloop.engine.distributed.buckets import broadcast, in_buckets
from hydraloop.errors import UserError

_FEW = 5
"""Up to this many parameters are named in an error."""


def wrap_in_ddp(
    task: nn.Module,
    *,
    bucket_cap_mb: float | None,
    find_unused_parameters: bool,
    sync: bool = True,
) -> nn.Module:
    """Return the task in DDP.

    Args:
        sync: whether all ranks get rank 0's parameters and buffers.
    """
    ddp: Any = _DDP
    if sync:  # before torch 2.13, DDP does this only together with doing it in every forward
        broadcast(task.buffers())
    # `before_evaluation` makes them equal again. torch 2.13 has renamed the option.
    new = "forward_sync_buffers" in inspect.signature(nn.parallel.DistributedDataParallel).parameters
    wrapped: nn.Module = ddp(
        task,
        **{"forward_sync_buffers" if new else "broadcast_buffers": False},
        init_sync=sync,
        bucket_cap_mb=bucket_cap_mb,
        find_unused_parameters=find_unused_parameters,
        gradient_as_bucket_view=True,  # saves a copy of all gradients
    )
    return wrapped


class _DDP(nn.parallel.DistributedDataParallel):
    """DDP whose error about unused parameters names them and the options."""

    def forward(self, *args: Any, **options: Any) -> Any:
        """Return what the task returns.

        Raises:
            UserError: no loss of the iteration before used some of the parameters.
        """
        try:
            return super().forward(*args, **options)  # type: ignore[no-untyped-call]  # torch has no types for it
        except RuntimeError as error:
            found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
            if found is None:
                raise
            trained = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
            names = [trained[int(index)] for index in found[1].split()]
            raise unused_error(names, "the loss") from error


def unused_error(names: list[str], loss: str) -> UserError:
    """Return the error of a loss that does not depend on all parameters."""
    more = f" and {len(names) - _FEW} more" if len(names) > _FEW else ""
    return UserError(
        f"{loss} does not depend on {', '.join(names[:_FEW])}{more}, so the ranks wait for gradients of it",
        key="distributed.find_unused_parameters",
        remedy="Set distributed.find_unused_parameters=true if other batches use them; freeze them ('hooks=[freeze]') "
        "if none does.",
    )


def average(parameters: Iterable[nn.Parameter]) -> None:
    """Replace gradients by their means over the ranks; one without a gradient counts as zeros. No host sync."""
    gradients = []
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        gradients.append(parameter.grad)
    in_buckets(gradients, lambda flat: dist.all_reduce(flat.div_(dist.get_world_size())))
