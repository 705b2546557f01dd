"""How much the loss of each batch counts in an optimizer step.

The gradient of a window is that of the mean loss over all its terms (samples, tokens, boxes) on all ranks:

    gradient of  sum of the losses of all terms / number of all terms

Each rank backpropagates the losses of its own batches, and DDP or FSDP2 averages the gradients of the ranks. So the sum
of the losses of a batch is multiplied by `ranks / D`, where D is the number of all terms, if it is known before the
first backward: from the loader, which knows the samples of all ranks (`samples_at`), or from the task (`count`), whose
counts are summed over the ranks (as torchtitan does).

A task may return its number of terms only with its loss. Then D is a guess, equal on all ranks, and when the window
closes, the gradients are multiplied by D / number. The ranks sum the number together with the gradients
(`Distributed.tally`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from hydraloop.engine.device.batch_transfer import copies_without_blocking
from hydraloop.engine.distributed.comm import Distributed, Pending
from hydraloop.engine.distributed.fsdp import local
from hydraloop.engine.steps.loss_errors import wrong_loss_error

SamplesAt = Callable[[int], tuple[int, int]]
"""From a batch's index in the epoch to (its samples on this rank, its samples on all ranks)."""
SumAndCount = tuple[Tensor, Any]
"""The sum of the losses, a scalar tensor, and the number of losses, a number or scalar tensor."""


def mean_of(pair: SumAndCount) -> Tensor:
    """Return the mean of a sum and number of losses, a scalar tensor; 0 without losses. No host sync."""
    if not isinstance(pair, tuple | list):
        raise wrong_loss_error(pair)
    total, count = pair
    return total / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


def mean_and_weight(loss: Tensor | SumAndCount, samples: int) -> tuple[Tensor, float | Tensor]:
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


class LossWeighting:
    """The weights of the losses in one window after the other.

    Args:
        length: iterations in a full window, 1 or more.
        ranks: the ranks.
        device: of the run, on which numbers of terms are summed.
        samples_at: of the train loader, if it has one.
    """

    def __init__(
        self, length: int, ranks: Distributed, device: torch.device, samples_at: SamplesAt | None = None
    ) -> None:
        self._length, self._ranks, self._device, self._samples_at = length, ranks, device, samples_at
        self.samples = 0
        """Samples of this rank in the current batch; 0 for a filler batch."""
        self.samples_of_all = 0
        """Samples of all ranks in it; without `samples_at`, as if each rank had as many as this one."""
        self._is_first = True  # whether the next batch begins a window
        self._divisor: float | Tensor = 1.0  # D
        self._divisor_is_known = False
        self._unit = 0.0  # guess of the terms of a rank in an iteration, a power of two
        self._count: Any = 0  # terms of this rank in the window, if the ranks have to sum them
        self._samples = 0  # of this rank in the window
        self._counts_terms = False  # whether the task has returned numbers of terms
        self._sum = Pending()

    def begin_window(self, indices: Sequence[int], count: Any = None) -> None:
        """Begin a window, before its first forward.

        Args:
            indices: of its batches in the epoch.
            count: terms of this rank in the window, a number or a scalar tensor, if the task counts them. They are
                summed over the ranks: one all-reduce on the device, no host sync.
        """
        self._is_first, self._count, self._samples, self._counts_terms = True, 0, 0, False
        self._divisor_is_known = True
        if count is not None:
            self._divisor = self._sum_over_ranks(count)
        elif self._samples_at is not None:
            self._divisor = float(sum(self._samples_at(index)[1] for index in indices))
        else:
            self._divisor_is_known = False

    def _sum_over_ranks(self, count: Any) -> float | Tensor:
        if self._ranks.world_size == 1:
            return count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
        total = self._ranks.sum(self._as_tensor(count))
        return total.clamp(min=1).reshape(())

    def begin_batch(self, batch_idx: int, samples: int) -> None:
        """Count a batch of this rank before its forward.

        Args:
            batch_idx: in the epoch.
            samples: of this rank, in the batch.
        """
        if self._samples_at is None:
            self.samples, self.samples_of_all = samples, samples * self._ranks.world_size
        else:
            self.samples, self.samples_of_all = self._samples_at(batch_idx)
        if self._is_first and not self._divisor_is_known:
            self._divisor = float(samples * self._length or self._divisor)  # without samples, that of the last window
        self._is_first = False
        self._samples += self.samples

    def weigh(self, loss: Tensor | SumAndCount, count: Any = None) -> Tensor:
        """Return the loss to backpropagate.

        No host sync, except for a pair without `count` in the very first iteration.

        Args:
            loss: the mean over the terms of the batch, or their sum and number.
            count: terms of the batch, if `begin_window` got those of the window.
        """
        ranks = self._ranks.world_size
        if isinstance(loss, Tensor):
            if count is not None:
                factor: float | Tensor = count * (ranks if self.samples else 0) / self._divisor
                return loss * factor
            if not self._divisor_is_known and ranks > 1:
                self._add_terms(self.samples)
            weight = self.samples * ranks / self._divisor
            return loss if weight == 1.0 else loss * weight
        total, number = loss
        if count is None:
            self._add_terms(number if self.samples else number * 0)  # a filler batch counts as 0
        return total * ((ranks if self.samples else 0) / self._divisor)

    def _add_terms(self, count: Any) -> None:
        """Add to the terms of the window, for which D is a guess."""
        if not self._unit:  # to multiply and divide by a power of two loses no bit
            self._unit = self._ranks.from_main(2.0 ** round(max(float(count), 1.0)).bit_length())
        self._divisor = self._unit * self._ranks.world_size * self._length
        self._count = self._count + count
        self._counts_terms = True

    def tally_gradient(self) -> tuple[Tensor, Tensor] | None:
        """Return the tally and its gradient, for the backward that closes the window; None if it is not needed.

        Without a tally (FSDP2), start to sum the number of terms over the ranks.
        """
        tally = self._ranks.tally
        if self._ranks.world_size == 1 or (tally is None and not self._counts_terms):
            return None
        count = self._as_tensor(self._count)
        if tally is not None:
            return tally, count
        self._count = count
        self._sum = self._ranks.start_sum(self._count)
        return None

    def correct(self, optimizer: optim.Optimizer) -> None:
        """Multiply the gradients of a closing window by D / number of terms, if D was a guess. No host sync."""
        tally = self._ranks.tally
        if self._counts_terms:
            count = self._count
            if tally is not None and tally.grad is not None:
                count = tally.grad * self._ranks.world_size
            elif self._ranks.world_size > 1:
                self._sum.wait()
            number = count.reshape(()).clamp(min=1) if isinstance(count, Tensor) else max(count, 1)
            self._multiply(optimizer, self._divisor / number)
        elif not self._divisor_is_known and self._samples != self._divisor:
            self._multiply(optimizer, self._divisor / max(self._samples, 1))
        if tally is not None:
            tally.grad = None

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
        if self._ranks.sharded:
            gradients = [local(gradient) for gradient in gradients]
        if gradients:
            if isinstance(factor, Tensor):
                factor = factor.to(gradients[0].device)  # shards may be in host memory
            # torch documents the _foreach_ functions as beta. On a GPU they need few kernels, not one for each tensor.
            torch._foreach_mul_(gradients, factor)
