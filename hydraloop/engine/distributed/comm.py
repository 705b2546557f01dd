"""What the engine asks of the other ranks. This is the face, and what it answers in a single process: its own values.

Several processes are `ranks.Ranks`. The engine and the hooks know this face only, so none of them asks how many ranks
there are before it does its work.
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
    """The same on this machine; chooses the GPU."""
    local_world_size: int = 1
    """How many there are on this machine."""
    node_rank: int = 0
    """This machine's number; rank 0 is on machine 0."""
    world_size: int = 1
    """How many processes train together."""
    sharded: bool = False
    """Whether each rank holds only a shard of the model, so that a forward needs all ranks."""
    agree_interval: int = 10
    """Iterations between two exchanges of what hooks asked for."""
    orphaned: bool = False
    """Whether, after this rank has failed, the process that started the ranks turned out to be gone: what a rank raises
    then is that the others have noticed it before."""
    tally: Tensor | None = None
    """A parameter `[1]` whose gradient rides on the averaging of the model's; None where there is no such ride."""

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
        """Give this rank its part of the model, in place: on the device, before an optimizer is built."""

    def wrap(self, task: nn.Module) -> nn.Module:
        """The module whose forward the engine calls in training."""
        return task

    def sync_gradients(self, on: bool) -> None:
        """Whether the next forward's backward averages gradients over the ranks; said before the forward."""

    def before_evaluation(self, task: nn.Module) -> None:
        """Give all ranks the same to evaluate: rank 0's buffers (the statistics of normalisation layers)."""

    def after_evaluation(self) -> None:
        """Forget what was gathered for it."""

    # Values; each method is called on every rank. --------------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        """The sum of `values` (any shape) over all ranks."""
        return values

    def gather(self, value: Any) -> list[Any]:
        """A plain value (numbers, strings, tensors on the CPU, lists and dicts of these) of all ranks, by rank."""
        return [value]

    def from_main(self, value: Any) -> Any:
        """Rank 0's plain value."""
        return value

    def barrier(self) -> None:
        """Wait until all ranks are here."""

    def start_max(self, values: Tensor) -> Pending:
        """Begin to bring `values` (on the CPU) to their maximum over all ranks, in place and in the background."""
        return Pending()

    def start_sum(self, values: Tensor) -> Pending:
        """Begin to add `values` (on the device) up over all ranks, in place and in the background."""
        return Pending()

    # The end. --------------------------------------------------------------------------------------------------------

    def abandon(self, error: BaseException) -> None:
        """This rank has failed. It tells the others, and from now on every method answers as in a single process, so
        that closing hooks do not wait for ranks that will not come."""

    def first_failure(self) -> tuple[int, str] | None:
        """(rank, what it raised) of the rank that failed first; None where none has."""
        return None

    def close(self) -> None:
        """Leave the group of processes."""


class Pending:
    """Something that goes on in the background; this one is done already."""

    def wait(self) -> None:
        """Wait until it is done; on a GPU only its stream waits."""
