"""The communication interface between ranks, for the engine and the hooks.

`Distributed` is a single process and returns its own values; `process_group.ProcessGroup` is one of several processes.
So callers need not know how many ranks there are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from hydraloop.errors import UserError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


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
    mesh: DeviceMesh | None = None
    """If `sharded`: of the host memories, to save and load shards; its group is for the thread that saves."""
    agree_interval: int = 10
    """Iterations between two exchanges of the requests of hooks."""
    orphaned: bool = False
    """Whether this rank failed after the process that started it had ended, which is then the cause."""

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which writes files and logs."""
        return self.rank == 0

    # The model. ------------------------------------------------------------------------------------------------------

    def device(self, wanted: str) -> torch.device:
        """Return the device of this rank (`choose_device`); of several GPUs, the one with the local rank's number.

        Raises:
            UserError: torch knows no such device, or this machine does not have it.
        """
        return choose_device(wanted, local_rank=None if self.world_size == 1 else self.local_rank)

    def prepare(self, model: nn.Module, autocast: torch.dtype | None = None) -> None:
        """Shard the model in place, if the run does. Called with the model on the device, before the optimizer.

        Args:
            autocast: the dtype in which the model computes; None: that of its parameters.
        """

    def wrap(self, task: nn.Module, *, is_first: bool = True) -> nn.Module:
        """Return the module whose forward the engine calls in training.

        Args:
            is_first: False: the task has been wrapped before, so its tensors stay as they are on each rank.
        """
        return task

    def sync_gradients(self, on: bool) -> None:
        """Set, before a forward pass, whether its backward averages the gradients over the ranks."""

    def broadcast_weights(self, task: nn.Module) -> None:
        """Copy rank 0's parameters and buffers to all ranks, for a task that is not wrapped."""

    def average(self, parameters: Mapping[str, nn.Parameter], step: str) -> None:
        """Replace the gradients of parameters by their means over all ranks, if no wrapper does it. No host sync.

        Args:
            parameters: by name, the same on all ranks.
            step: name of the task's step, for the error.

        Raises:
            UserError: a parameter has no gradient, and `find_unused_parameters` is off.
        """

    def before_evaluation(self, task: nn.Module) -> None:
        """Copy rank 0's buffers (statistics of normalisation layers) to all ranks."""

    def after_evaluation(self) -> None:
        """Free weights that were gathered for the evaluation."""

    def lower_timeout(self) -> None:
        """Lower the time that ranks wait for each other; called once on every rank, after the first optimizer step."""

    # Values; each method is called on every rank. --------------------------------------------------------------------

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum of `values` (any shape) over all ranks."""
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        """Return the `values` `[N, …]` of all ranks as `[ranks * N, …]`, by rank; N is the same on all ranks.

        Gradients flow back to all ranks, so a loss over the values of all ranks is trained as in one process.
        """
        return values

    def gather(self, value: Any) -> list[Any]:
        """Return the values of all ranks, by rank: numbers, strings, CPU tensors, and lists and dicts of these."""
        return [value]

    def from_main(self, value: Any) -> Any:
        """Return rank 0's value, of the same types as in `gather`."""
        return value

    def barrier(self) -> None:
        """Wait until all ranks have called it."""

    def start_max(self, values: Tensor) -> Pending:
        """Start to replace `values` (on the CPU) by their maximum over all ranks, in place and in the background."""
        return Pending()

    def start_sum(self, values: Tensor) -> Pending:
        """Start to replace `values` (on the device) by their sum over all ranks, in place and in the background."""
        return Pending()

    # The end. --------------------------------------------------------------------------------------------------------

    def abandon(self, error: BaseException) -> None:
        """Tell the other ranks that this one has failed. From now on, every method returns this rank's own values, so
        that closing hooks do not wait for other ranks."""

    def first_failure(self) -> tuple[int, str] | None:
        """Return the rank that failed first and its error; None if no rank has failed."""
        return None

    def close(self) -> None:
        """Leave the group of processes."""


class Pending:
    """A communication in the background; this class is one that is complete."""

    def wait(self) -> None:
        """Wait until it is complete; on a GPU, only its stream waits."""


def choose_device(wanted: str, *, local_rank: int | None = None) -> torch.device:
    """Return the device of this process. If it has a number, it becomes the current device of the calling thread.

    Args:
        wanted: `auto` for the current accelerator, if there is one, else the CPU; or `cpu`, `cuda`, `cuda:1`.
        local_rank: with several processes, the number of this one on its machine: it uses the device of that number
            unless `wanted` names another. None: a single process.

    Raises:
        UserError: torch knows no such device, or this machine does not have it.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = 0 if accelerator is None else torch.accelerator.device_count()
    remedy = "Use auto, cpu, or a device such as cuda:0."
    try:
        device = (accelerator or torch.device("cpu")) if wanted == "auto" else torch.device(wanted)
    except RuntimeError as error:
        raise UserError(f"torch knows no device {wanted!r}", key="engine.device", remedy=remedy) from error
    if device.type == "cpu":
        return device
    here = available if accelerator is not None and accelerator.type == device.type else 0
    if (device.index or 0) >= here:
        remedy = remedy if here else "Use auto or cpu."
        raise UserError(f"this machine has no {wanted}", key="engine.device", remedy=remedy)
    if local_rank is not None and wanted in ("auto", device.type):
        if local_rank >= available:
            raise UserError(
                f"there are {available} devices for the process {local_rank} (from 0) of this machine",
                key="distributed.nproc_per_node",
                remedy=f"Use {available} or fewer, or engine.device=cpu.",
            )
        device = torch.device(device.type, local_rank)
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    return device


def same_device() -> Callable[[], object]:
    """Return a function that gives the thread that calls it the current device of this thread.

    A new thread begins with device 0, and its first call of CUDA would take memory there.
    """
    if not torch.accelerator.is_available():
        return lambda: None
    return functools.partial(torch.accelerator.set_device_index, torch.accelerator.current_device_index())


class SumsByName:
    """Adds up pairs of numbers by name over the ranks, in one exchange.

    The ranks add up one vector, whose layout depends on `names`. These are the same on all ranks, because they change
    only by what was gathered from all ranks.

    Args:
        names: which every rank has.
    """

    def __init__(self, *names: str) -> None:
        self.names = [*names]
        """The names that a rank has had."""

    def over_ranks(
        self,
        mine: Mapping[str, Tensor],
        zeros: Tensor,
        reduce: Callable[[Tensor], Tensor],
        gather: Callable[[Any], list[Any]],
        parts: Sequence[Tensor] = (),
    ) -> tuple[dict[str, tuple[float, float]], list[Tensor]]:
        """Return the sum of each name, and the vectors `parts` summed; called on every rank. One host sync.

        Args:
            mine: a tensor `[2]` for each name of this rank.
            zeros: a tensor `[2]`, for the names that this rank does not have.
            reduce: sums a vector over all ranks. Called again if a rank has a new name.
            gather: returns a plain value of all ranks. Called for new names.
            parts: other vectors to sum.
        """
        while True:
            rows = [mine.get(name, zeros) for name in self.names]
            is_new = zeros[:1] + (not mine.keys() <= set(self.names))
            row = reduce(torch.cat([is_new, *rows, *parts]))
            head, *summed = torch.split(row, [1 + 2 * len(rows), *map(len, parts)])
            has_new, *sums = head.tolist()
            if not has_new:
                return dict(zip(self.names, zip(sums[::2], sums[1::2], strict=True), strict=True)), summed
            of_ranks = (self.names, *gather(list(mine)))
            self.names = list(dict.fromkeys(name for names in of_ranks for name in names))
