"""What the engine asks of the other ranks. One process for now: every answer is this rank's own.

The engine and the hooks go through this face everywhere, so that launching, wrapping (DDP, FSDP2) and agreement between
ranks can be put behind it without a change elsewhere.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from hydraloop.errors import UserError


class Distributed:
    """A single process: rank 0 of 1."""

    rank: int = 0
    """This process's number, 0 .. world_size - 1."""
    world_size: int = 1
    """How many processes train together."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and logs."""
        return self.rank == 0

    def device(self, wanted: str) -> torch.device:
        """The device of this rank: `auto` is the current accelerator where there is one, else the CPU.

        Raises:
            UserError: torch knows no such device, or this machine has none.
        """
        if wanted != "auto":
            return _checked(wanted)
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        return accelerator if accelerator is not None else torch.device("cpu")

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module whose forward the engine calls."""
        return module

    def mean(self, values: Tensor) -> Tensor:
        """The mean of `values` (any shape) over all ranks; called on every rank."""
        return values

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` (any shape) over all ranks; called on every rank."""
        return values

    def any(self, flag: bool) -> bool:
        """Whether the flag is set on any rank; called on every rank."""
        return flag


def _checked(wanted: str) -> torch.device:
    remedy = "Use auto, cpu, or cuda:0 and the like."
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UserError(f"torch knows no device {wanted!r}", key="engine.device", remedy=remedy) from error
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    here = 0 if accelerator is None or accelerator.type != device.type else torch.accelerator.device_count()
    if device.type != "cpu" and (device.index or 0) >= here:
        raise UserError(f"this machine has no {wanted}", key="engine.device", remedy=remedy)
    return device
