"""The accumulation window: which iterations share an optimizer step, and how much each counts in it.

The gradient of a window is that of the mean over all its samples (or tokens), on all ranks:

    gradient of  sum of the losses of all samples / number of all samples

A rank backpropagates its batches' parts, the ranks' gradients are averaged (DDP, FSDP2), so each part is weighted by
`ranks / D`, with a number D that all ranks share. Where D is the number of samples, that is all: a loader that knows
all ranks' samples (`samples_at`) says it before the window begins. Otherwise D is a guess, and when the window closes
the gradients are multiplied once by D / number; the number has come with the gradients (`Distributed.tally`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim

from hydraloop.engine.device.batch_transfer import copies_without_blocking
from hydraloop.engine.distributed.comm import Distributed, Pending
from hydraloop.engine.distributed.fsdp import local

Share = Callable[[int], tuple[int, int]]
"""From a batch's index in the epoch to (samples of this rank in it, samples of all ranks)."""
Pair = tuple[Tensor, Any]
"""The sum of the losses, a scalar tensor, and how many they are, a number or scalar tensor."""


def mean_of(pair: Pair) -> Tensor:
    """The mean of a sum and number of losses, 0 where there are none; a scalar tensor. No host sync."""
    total, count = pair
    return total / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


class Window:
    """The iterations since the last optimizer step.

    Args:
        length: iterations in a full window, 1 or more.
        epoch_length: iterations in an epoch, whose last window may be shorter.
        distributed: the ranks.
        share: of the train loader, where it has one.
    """

    def __init__(self, length: int, epoch_length: int, distributed: Distributed, share: Share | None = None) -> None:
        self._length, self._epoch_length = length, epoch_length
        self._distributed, self._share = distributed, share
        self._ranks = distributed.world_size
        self._size = 0
        self._mine = 0
        self._batch = 0  # samples of all ranks in the batch
        self._samples = 0  # of this rank, in the window
        self._total: int | None = None  # samples of all ranks in the whole window, where that is known
        self._unit = 0.0  # samples or tokens that a rank is taken to have in an iteration, a power of two
        self._divisor = 1.0  # D
        self._count: Any = 0  # this rank's part of the number, where it has to be asked for
        self._pending = Pending()
        self._asks = False
        self._device = torch.device("cpu") if distributed.tally is None else distributed.tally.device

    @property
    def samples(self) -> int:
        """Samples of all ranks in the batch begun last; without a share, taken to be as many on each."""
        return self._batch

    def discard(self) -> None:
        """Begin anew, whatever the window has."""
        self._size = 0

    def begin(self, batch_idx: int, samples: int, left: int) -> bool:
        """Count a batch of `samples` in, before its forward. Returns whether its iteration ends the window.

        Args:
            batch_idx: in the epoch.
            left: iterations until training ends, this one included.
        """
        ahead = min(self._length - self._size, self._epoch_length - batch_idx, left)
        if self._share is None:
            self._mine, self._batch = samples, samples * self._ranks
        else:
            self._mine, self._batch = self._share(batch_idx)
            if self._size == 0:
                self._total = sum(self._share(index)[1] for index in range(batch_idx, batch_idx + ahead))
        if self._size == 0:
            # For a first batch without samples the guess is that of the window before.
            self._divisor = float(self._total or samples * self._length or self._divisor)
            self._samples, self._count, self._asks = 0, 0, False
        self._size += 1
        self._samples += self._mine
        return ahead <= 1

    def weigh(self, loss: Tensor | Pair) -> Tensor:
        """What to backpropagate for the batch's mean loss, or its sum and number of losses.

        No host sync, except for a pair in the first iteration of all.
        """
        if not isinstance(loss, Tensor):
            total, count = loss
            self._device = total.device
            self._ask(count if self._mine else count * 0)  # a filler batch counts for nothing
            return total * ((self._ranks if self._mine else 0) / self._divisor)
        if self._total is None and self._ranks > 1:
            self._device = loss.device
            self._ask(self._mine)
        weight = self._mine * self._ranks / self._divisor
        return loss if weight == 1.0 else loss * weight

    def _ask(self, count: Any) -> None:
        """Count towards a number that only the end of the window knows."""
        if not self._unit:  # a power of two: whatever it is, multiplying and dividing by it loses no bit
            self._unit = self._distributed.from_main(2.0 ** round(max(float(count), 1.0)).bit_length())
        self._divisor = self._unit * self._ranks * self._length
        self._count = self._count + count
        self._asks = True

    def riding(self) -> tuple[Tensor, Tensor] | None:
        """(a leaf, its gradient) to backpropagate along in the iteration that closes the window, if there is a ride.

        With ranks that have no such ride (FSDP2) the number begins its own way here.
        """
        tally = self._distributed.tally
        if self._ranks == 1 or (tally is None and not self._asks):
            return None
        count = self._as_tensor(self._count)
        if tally is not None:
            return tally, count
        self._count = count
        self._pending = self._distributed.start_sum(self._count)
        return None

    def correct(self, optimizer: optim.Optimizer) -> None:
        """Bring the gradients of a closing window to the mean over what it had; then it is empty. No host sync."""
        tally = self._distributed.tally
        if self._asks:
            count = self._count
            if tally is not None and tally.grad is not None:
                count = tally.grad * self._ranks
            elif self._ranks > 1:
                self._pending.wait()
            if isinstance(count, Tensor):
                self._multiply(optimizer, self._divisor / count.reshape(()).clamp(min=1))
            else:
                self._multiply(optimizer, self._divisor / max(count, 1))
        elif self._total is None and self._samples != self._divisor:
            self._multiply(optimizer, self._divisor / max(self._samples, 1))
        if tally is not None:
            tally.grad = None
        self._size = 0

    def _as_tensor(self, count: Any) -> Tensor:
        """A count as a float tensor `[1]` on the device."""
        if isinstance(count, Tensor):
            non_blocking = copies_without_blocking(self._device)
            return count.detach().reshape(1).to(self._device, torch.float32, copy=True, non_blocking=non_blocking)
        return torch.full((1,), float(count), device=self._device)

    def _multiply(self, optimizer: optim.Optimizer, factor: float | Tensor) -> None:
        gradients = [
            parameter.grad
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
        if self._distributed.sharded:
            gradients = [local(gradient) for gradient in gradients]
        if gradients:
            if isinstance(factor, Tensor):
                factor = factor.to(gradients[0].device)  # shards may wait in host memory
            # torch documents the _foreach_ functions, as beta. On a GPU they are few kernels, not one for each tensor.
            torch._foreach_mul_(gradients, factor)
