"""How much the loss of each batch counts in an optimizer step.

The gradient of a window is that of the mean loss over all its terms (samples, tokens, boxes) on all ranks:

    gradient of  sum of the losses of all terms / number of all terms

Each rank backpropagates the losses of its own batches, and DDP or FSDP2 averages the gradients of the ranks. So the sum
of the losses of a batch is multiplied by `ranks / D`, where D is the number of all terms, known before the first
backward: from the loader, which knows the samples of all ranks (`samples_at`), or from the task (`count`), whose counts
are summed over the ranks (as torchtitan does).

A task may return its number of terms only with its loss. Then D is a guess, equal on all ranks. The number is summed
over the ranks during the last backward, and the gradients are multiplied by D / number.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, optim

from hydraloop.engine.device.batch_transfer import copies_without_blocking
from hydraloop.engine.distributed.comm import Distributed, Pending
from hydraloop.engine.distributed.fsdp import local
from hydraloop.engine.steps.loss_errors import counted_mean_error, wrong_count_error, wrong_loss_error

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


def mean_and_weight(loss: SumAndCount, samples: int) -> tuple[Tensor, float | Tensor]:
    """Return the mean loss of a batch and its weight in a mean over batches and ranks. No host sync.

    Args:
        loss: the sum and number of losses.
        samples: of this rank in the batch; 0 for a filler, whose weight is 0.
    """
    mean, count = mean_of(loss), loss[1]
    if not samples:
        return mean, 0
    return mean, count.detach() if isinstance(count, Tensor) else count


def _at_least_one(terms: Any) -> float | Tensor:
    """Return a number of terms, a scalar, as a divisor."""
    return terms.detach().reshape(()).clamp(min=1) if isinstance(terms, Tensor) else max(terms, 1)


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
        self._known: Literal["samples", "terms"] | None = None  # what D is a number of; None: it is a guess
        self._unit = 0.0  # guess of the terms of a rank in an iteration, a power of two
        self._samples = 0  # of this rank in the window
        self._terms: Any = None  # of this rank in the window, if D is not their number
        self._summed = Pending()  # the sum of the terms over the ranks
        self._counted: Any = None  # terms of this rank in the first window that the task has counted
        self._returned: Any = 0  # those that it has returned with the losses of that window
        self._is_checked = False  # whether both are the same

    def begin_window(self, indices: Sequence[int], terms: Any = None) -> None:
        """Begin a window, before its first forward.

        Args:
            indices: of its batches in the epoch.
            terms: of this rank in the window, a number or a scalar tensor, if the task counts them. They are summed
                over the ranks: one all-reduce on the device, no host sync.
        """
        self._is_first, self._samples, self._terms = True, 0, None
        if terms is not None:
            self._known, self._divisor = "terms", self._sum_over_ranks(terms)
            self._counted, self._returned = terms, 0
        elif self._samples_at is not None:
            samples = sum(self._samples_at(index)[1] for index in indices)
            self._known, self._divisor = "samples", float(max(samples, 1))
        else:
            self._known = None

    def _sum_over_ranks(self, terms: Any) -> float | Tensor:
        if self._ranks.world_size == 1:
            return _at_least_one(terms)
        return _at_least_one(self._ranks.sum(self._as_tensor(terms)))

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
        if self._is_first and self._known is None:
            self._divisor = float(samples * self._length or self._divisor)  # without samples, that of the last window
        self._is_first = False
        self._samples += self.samples

    def weigh(self, loss: Tensor | SumAndCount) -> Tensor:
        """Return the loss to backpropagate.

        No host sync, except for a pair that is not counted, in the very first iteration.

        Args:
            loss: the mean over the samples of the batch, or the sum over its terms and their number.

        Raises:
            UserError: the task has counted the terms, and the loss is not a pair.
        """
        ranks = self._ranks.world_size
        if isinstance(loss, Tensor):
            if self._known == "terms":
                raise counted_mean_error()
            if self._known is None and ranks > 1:
                self._guess_divisor(self.samples)
            weight = self.samples * ranks / self._divisor
            return loss if weight == 1.0 else loss * weight
        total, terms = loss
        terms = terms if self.samples else terms * 0  # a filler batch counts as 0
        if self._known != "terms":
            self._guess_divisor(terms)
        elif not self._is_checked:
            self._returned = self._returned + terms
        return total * ((ranks if self.samples else 0) / self._divisor)

    def _guess_divisor(self, terms: Any) -> None:
        """Add the terms of a batch to those of the window, and let D be a guess of their number."""
        if not self._unit:  # to multiply and divide by a power of two loses no bit
            self._unit = self._ranks.from_main(2.0 ** round(max(float(terms), 1.0)).bit_length())
        self._divisor = self._unit * self._ranks.world_size * self._length
        self._terms = terms if self._terms is None else self._terms + terms

    def close_window(self) -> None:
        """Before the backward that closes a window, start to sum the terms over the ranks, if D is a guess."""
        if self._terms is not None and self._ranks.world_size > 1:
            self._terms = self._as_tensor(self._terms)
            self._summed = self._ranks.start_sum(self._terms)

    def correct(self, optimizer: optim.Optimizer) -> None:
        """Multiply the gradients of a closed window by D / number of terms, if D was a guess.

        No host sync, except after the first window whose terms the task has counted.

        Raises:
            UserError: the task has counted other terms in that window than it has returned with the losses.
        """
        if self._known == "terms" and not self._is_checked:
            self._is_checked = True
            if float(self._counted) != float(self._returned):
                raise wrong_count_error(float(self._counted), float(self._returned))
        if self._terms is not None:
            self._summed.wait()
            self._multiply(optimizer, self._divisor / _at_least_one(self._terms))
        elif self._known is None and self._samples != self._divisor:
            self._multiply(optimizer, self._divisor / max(self._samples, 1))

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
