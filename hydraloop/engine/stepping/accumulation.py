"""Gradient accumulation: which iterations share an optimizer step, and how much each counts in it.

The gradient of a window is that of the mean loss over all its samples (or tokens) on all ranks:

    gradient of  sum of the losses of all samples / number of all samples

Each rank backpropagates the loss of its own batches, and DDP or FSDP2 averages the gradients of the ranks. So each loss
is weighted by `ranks / D`, where D is the same on all ranks. If the loader knows the samples of all ranks
(`samples_at`), D is their number. Otherwise D is a guess; when the window closes, the gradients are multiplied by
D / number. The number is averaged together with the gradients (`Distributed.tally`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim

from hydraloop.engine.checks import wrong_loss_error
from hydraloop.engine.device.batch_transfer import copies_without_blocking
from hydraloop.engine.distributed.comm import Distributed, Pending
from hydraloop.engine.distributed.fsdp import local

Share = Callable[[int], tuple[int, int]]
"""From a batch's index in the epoch to (its samples on this rank, its samples on all ranks)."""
Pair = tuple[Tensor, Any]
"""The sum of the losses, a scalar tensor, and the number of losses, a number or scalar tensor."""


def mean_of(pair: Pair) -> Tensor:
    """Return the mean of a sum and number of losses, a scalar tensor; 0 without losses. No host sync."""
    if not isinstance(pair, tuple | list):
        raise wrong_loss_error(pair)
    total, count = pair
    return total / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


def weighed(loss: Tensor | Pair, samples: int) -> tuple[Tensor, float | Tensor]:
    """Return the mean loss of a batch and its weight in a mean over batches and ranks. No host sync.

    Args:
        loss: the mean over the samples, or the sum and number of losses.
        samples: of this rank in the batch; 0 for a filler, whose weight is 0.
    """
    if isinstance(loss, Tensor):
        return loss, samples
    mean, count = mean_of(loss), loss[1]
    if not samples:
        return mean, 0
    return mean, count.detach() if isinstance(count, Tensor) else count


class Window:
    """The iterations since the last optimizer step.

    Args:
        length: iterations in a full window, 1 or more.
        epoch_length: iterations in an epoch, whose last window may be shorter.
        distributed: the ranks.
        share: `samples_at` of the train loader, if it has one.
    """

    def __init__(self, length: int, epoch_length: int, distributed: Distributed, share: Share | None = None) -> None:
        self._length, self._epoch_length = length, epoch_length
        self._distributed, self._share = distributed, share
        self._ranks = distributed.world_size
        self._size = 0  # iterations begun
        self.mine = 0
        """Samples of this rank in the last batch begun."""
        self._samples = 0  # of this rank, in the window
        self.samples = 0
        """Samples of all ranks in the last batch begun; without `share`, as if each rank had as many as this one."""
        self._total: int | None = None  # samples of all ranks in the whole window, if known
        self._unit = 0.0  # guess of the samples or tokens of a rank in an iteration, a power of two
        self._divisor = 1.0  # D
        self._count: Any = 0  # this rank's part of the number, if the ranks have to add it up
        self._counts = False  # whether they have to
        self._pending = Pending()
        self._device = torch.device("cpu") if distributed.tally is None else distributed.tally.device

    def discard(self) -> None:
        """Begin a new window without closing this one."""
        self._size = 0

    def begin(self, batch_idx: int, samples: int, left: int) -> bool:
        """Count a batch before its forward pass. Return whether its iteration ends the window.

        Args:
            batch_idx: in the epoch.
            samples: of this rank, in the batch.
            left: iterations until training ends, this one included.
        """
        ahead = min(self._length - self._size, self._epoch_length - batch_idx, left)
        if self._share is None:
            self.mine, self.samples = samples, samples * self._ranks
        else:
            self.mine, self.samples = self._share(batch_idx)
            if self._size == 0:
                self._total = sum(self._share(index)[1] for index in range(batch_idx, batch_idx + ahead))
        if self._size == 0:
            # If the first batch has no samples, use the guess of the window before.
            self._divisor = float(self._total or samples * self._length or self._divisor)
            self._samples, self._count, self._counts = 0, 0, False
        self._size += 1
        self._samples += self.mine
        return ahead <= 1

    def weigh(self, loss: Tensor | Pair) -> Tensor:
        """Return the weighted loss to backpropagate, from a batch's mean loss or its sum and number of losses.

        No host sync, except for a pair in the very first iteration.
        """
        if not isinstance(loss, Tensor):
            total, count = loss
            self._device = total.device
            self._add(count if self.mine else count * 0)  # a filler batch counts as 0
            return total * ((self._ranks if self.mine else 0) / self._divisor)
        if self._total is None and self._ranks > 1:
            self._device = loss.device
            self._add(self.mine)
        weight = self.mine * self._ranks / self._divisor
        return loss if weight == 1.0 else loss * weight

    def _add(self, count: Any) -> None:
        """Add to the number of losses in the window."""
        if not self._unit:  # to multiply and divide by a power of two loses no bit
            self._unit = self._distributed.from_main(2.0 ** round(max(float(count), 1.0)).bit_length())
        self._divisor = self._unit * self._ranks * self._length
        self._count = self._count + count
        self._counts = True

    def tally_gradient(self) -> tuple[Tensor, Tensor] | None:
        """Return the tally and its gradient, for the backward that closes the window; None if it is not needed.

        Without a tally (FSDP2), start to sum the number over the ranks.
        """
        tally = self._distributed.tally
        if self._ranks == 1 or (tally is None and not self._counts):
            return None
        count = self._as_tensor(self._count)
        if tally is not None:
            return tally, count
        self._count = count
        self._pending = self._distributed.start_sum(self._count)
        return None

    def correct(self, optimizer: optim.Optimizer) -> None:
        """Turn the gradients of a closing window into the mean over its samples, and empty it. No host sync."""
        tally = self._distributed.tally
        if self._counts:
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
        """Return a count as a float tensor `[1]` on the device."""
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
                factor = factor.to(gradients[0].device)  # shards may be in host memory
            # torch documents the _foreach_ functions as beta. On a GPU they need few kernels, not one for each tensor.
            torch._foreach_mul_(gradients, factor)
