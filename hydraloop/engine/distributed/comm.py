"""The communication interface: what the engine and the hooks ask of the other ranks.

`Distributed` itself is a single process and returns its own values; several processes are a
`process_group.ProcessGroup`. So no code needs to ask how many ranks there are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hydraloop.engine.device.choose import choose_device


class Distributed:
    """A single process: rank 0 of 1."""

    rank: int = 0
    """This process's number, 0 .. world_size - 1."""
    local_rank: int = 0
    """Its number on this machine, which selects the GPU."""
    local_world_size: int = 1
    """How many ranks this machine has."""
    node_rank: int = 0
    """This machine's number; rank 0 is on machine 0."""
    world_size: int = 1
    """How many processes train together."""
    sharded: bool = False
    """Whether each rank holds only a shard of the model, so that a forward needs all ranks."""
    agree_interval: int = 10
    """Iterations between two exchanges of what hooks asked for."""
    orphaned: bool = False
    """Whether this rank failed after the process that started it had gone: its error then only follows from that."""
    tally: Tensor | None = None
    """A parameter `[1]` whose gradient is averaged together with the model's; None if there is none (see `ddp.py`)."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and logs."""
        return self.rank == 0

    # The model. ------------------------------------------------------------------------------------------------------

    def device(self, wanted: str) -> torch.device:
        """Return the device of this rank (`choose_device`).

        Raises:
            UserError: torch knows no such device, or this machine does not have it.
        """
        return choose_device(wanted)

    def prepare(self, model: nn.Module) -> None:
        """Give this rank its part of the model, in place: called with the model on the device, before the optimizer."""

    def wrap(self, task: nn.Module) -> nn.Module:
        """Return the module whose forward the engine calls in training."""
        return task

    def sync_gradients(self, on: bool) -> None:
        """Set, before a forward, whether its backward averages the gradients over the ranks."""

    def before_evaluation(self, task: nn.Module) -> None:
        """Give all ranks rank 0's buffers (the statistics of normalisation layers)."""

    def after_evaluation(self) -> None:
        """Drop what was gathered for an evaluation."""

    # Values; each method is called on every rank. --------------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` (any shape) over all ranks."""
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return all ranks' values, by rank: numbers, strings, tensors on the CPU, and lists and dicts of these."""
        return [value]

    def from_main(self, value: Any) -> Any:
        """Return rank 0's value, of the same types as in `gather`."""
        return value

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def start_max(self, values: Tensor) -> Pending:
        """Start to replace `values` (on the CPU) by their maximum over all ranks, in place and in the background."""
        return Pending()

    def start_sum(self, values: Tensor) -> Pending:
        """Start to replace `values` (on the device) by their sum over all ranks, in place and in the background."""
        return Pending()

    # The end. --------------------------------------------------------------------------------------------------------

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed. From now on, every method returns this rank's own values, so
        that closing hooks do not wait for ranks that will not come."""

    def first_failure(self) -> tuple[int, str] | None:
        """Return (rank, its error) for the rank that failed first; None if none has."""
        return None

    def close(self) -> None:
        """Leave the group of processes."""


class Pending:
    """A communication in the background; this one is already complete."""

    def wait(self) -> None:
        """Wait until it is complete; on a GPU, only its stream waits."""
