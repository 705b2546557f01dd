"""How much the loss of each batch counts in an optimizer step; and what is wrong with a loss or its gradients.

The gradient of a window is that of the mean loss over all its terms (samples, tokens, boxes) on all ranks:

    gradient of  sum of the losses of all terms / number of all terms

Each rank backpropagates the losses of its own batches, and DDP or FSDP2 averages the gradients of the ranks. So the sum
of the losses of a batch is multiplied by `ranks / D`, where D is the number of all terms.

D is known before the first backward if the loss is a mean over samples, and nothing can change the samples that the
sampler has drawn (`sizes_are_exact`). Otherwise, D is a guess, equal on all ranks: the terms are counted in each batch,
summed over the ranks during the last backward, and the gradients are multiplied by D / number of terms.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, optim

from hydraloop.engine.batch_transfer import copies_without_blocking
from hydraloop.engine.distributed.comm import Distributed, Pending
from hydraloop.engine.distributed.fsdp import local
from hydraloop.engine.loaders import has_exact_sizes, share_of
from hydraloop.errors import UserError

SamplesAt = Callable[[int], tuple[int, int]]
"""From a batch's index in the epoch to (its samples on this rank, its samples on all ranks)."""
SumAndCount = tuple[Tensor, Any]
"""The sum of the losses, a scalar tensor, and the number of losses, a number or scalar tensor."""


def mean_of(pair: SumAndCount) -> Tensor:
    """Return the mean of a sum and number of losses, a scalar tensor; 0 without losses. No host sync."""
    total, count = pair
    return total / (count.clamp(min=1) if isinstance(count, Tensor) else max(count, 1))


def mean_and_weight(loss: Tensor | SumAndCount, samples: int) -> tuple[Tensor, float | Tensor]:
    """Return the mean loss of a batch and its weight in a mean over batches and ranks. No host sync.

    Args:
        loss: the mean over the samples of the batch, or the sum over its terms and their number.
        samples: of this rank in the batch; 0 for a filler, whose weight is 0.
    """
    if isinstance(loss, Tensor):
        return loss, samples
    count = loss[1].detach() if isinstance(loss[1], Tensor) else loss[1]
    return mean_of(loss), count if samples else 0


def _at_least_one(terms: Any) -> float | Tensor:
    """Return a number of terms, a scalar, as a divisor."""
    return terms.detach().reshape(()).clamp(min=1) if isinstance(terms, Tensor) else max(terms, 1)


class LossWeighting:
    """The weights of the losses in one window after the other.

    Args:
        length: iterations in a full window, 1 or more.
        ranks: the ranks.
        device: of the run, on which numbers of terms are summed.
    """

    def __init__(self, length: int, ranks: Distributed, device: torch.device) -> None:
        self._length, self._ranks, self._device = length, ranks, device
        self.samples_at: SamplesAt | None = None
        """The samples of each rank in a batch, as the train loader plans them; None if it does not know them."""
        self.sizes_are_exact = False
        """Whether each batch has the samples that `samples_at` returns. The same on all ranks."""
        self._is_pair: dict[str, bool] = {}  # by step, whether its loss is a pair
        self.local_samples = 0
        """Samples of this rank in the current batch; 0 for a filler batch."""
        self.global_samples = 0
        """Samples that the samplers of all ranks have drawn for it; without `samples_at`, as if each rank had as many
        as this one."""
        self._divisor = 0.0  # D; 0: a guess follows with the first loss of the window
        self._unit = 0.0  # of several ranks, a guess of the terms of a rank in an iteration, a power of two
        self._terms: Any = None  # of this rank in the window, if D is a guess
        self._summed = Pending()  # the sum of the terms over the ranks

    def begin_training(self, loader: object, *, may_differ: bool) -> None:
        """Begin to train, on every rank.

        Args:
            loader: of training.
            may_differ: whether a batch may have other samples than the sampler has drawn.
        """
        self.samples_at = share_of(loader)
        self.sizes_are_exact = all(self._ranks.gather(has_exact_sizes(loader) and not may_differ))

    def begin_window(self, indices: Sequence[int]) -> None:
        """Begin a window, before its first forward.

        Args:
            indices: of its batches in the epoch.
        """
        self._divisor, self._terms = 0.0, None
        if self.sizes_are_exact and self.samples_at is not None:
            self._divisor = float(sum(self.samples_at(index)[1] for index in indices))

    def begin_batch(self, batch_idx: int, samples: int) -> None:
        """Count a batch of this rank before its forward.

        Args:
            batch_idx: in the epoch.
            samples: of this rank, in the batch.
        """
        self.local_samples, self.global_samples = samples, samples * self._ranks.world_size
        if self.samples_at is not None:
            drawn, self.global_samples = self.samples_at(batch_idx)
            if self.sizes_are_exact or drawn == 0:  # a filler has samples of other ranks
                self.local_samples = drawn
            elif self._ranks.world_size == 1:
                self.global_samples = samples

    def weigh(self, loss: Tensor | SumAndCount, step: str) -> Tensor:
        """Return the loss to backpropagate. No host sync, except for a count on the device in the very first iteration.

        Args:
            loss: the mean over the samples of the batch, or the sum over its terms and their number.
            step: of the task, if it has steps.

        Raises:
            UserError: the loss of the step is a mean in some batches, and a pair in others.
        """
        is_pair = not isinstance(loss, Tensor)
        if self._is_pair.setdefault(step, is_pair) is not is_pair:
            raise UserError(
                "the loss is a mean in some batches and a pair (sum, count) in others",
                key="task",
                remedy='Return {"loss": (sum, count)} for all batches.',
            )
        ranks = self._ranks.world_size
        if isinstance(loss, Tensor):
            if not self._divisor or self._terms is not None:
                self._guess_divisor(self.local_samples)
            weight = self.local_samples * ranks / self._divisor
            return loss if weight == 1.0 else loss * weight
        total, terms = loss
        self._guess_divisor(terms if self.local_samples else terms * 0)  # a filler batch counts as 0
        return total * ((ranks if self.local_samples else 0) / self._divisor)

    def _guess_divisor(self, terms: Any) -> None:
        """Add the terms of a batch to those of the window, and let D be a guess of their number."""
        if self._terms is None:
            self._divisor = self._guess(terms) * self._ranks.world_size * self._length
        self._terms = terms if self._terms is None else self._terms + terms

    def _guess(self, terms: Any) -> float:
        """Return a guess of the terms of each batch in the window, from its first batch."""
        if self._ranks.world_size == 1 and not isinstance(terms, Tensor):
            return float(max(terms, 1))  # right if all batches have as many: then the gradients stay as they are
        if not self._unit:  # to multiply and divide by a power of two loses no bit
            self._unit = self._ranks.from_main(2.0 ** round(max(float(terms), 1.0)).bit_length())
        return self._unit

    def start_summing_terms(self) -> None:
        """Before the last backward of a window, start to sum the terms over the ranks, if D is a guess."""
        if self._terms is not None and self._ranks.world_size > 1:
            self._terms = self._as_tensor(self._terms)
            self._summed = self._ranks.start_sum(self._terms)

    def rescale_gradients(self, optimizer: optim.Optimizer) -> None:
        """Multiply the gradients of a whole window by D / number of terms, if D was a guess. No host sync."""
        if self._terms is not None:
            self._summed.wait()
            factor = self._divisor / _at_least_one(self._terms)
            if isinstance(factor, Tensor) or factor != 1.0:
                self._multiply(optimizer, factor)

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


# What is wrong with a loss. -------------------------------------------------------------------------------------------


def loss_to_minimise(task: Any, outputs: Any, step: str = "") -> Tensor | SumAndCount:
    """Return the loss in what a task returned in training. No host sync.

    Args:
        task: whose `forward` has returned it.
        outputs: of the task.
        step: of the task, if it has steps.

    Raises:
        UserError: there is no loss, or it cannot be backpropagated.
    """
    loss = loss_of(task, outputs, step)
    total = loss if isinstance(loss, Tensor) else loss[0]
    if not total.is_floating_point():
        remedy = "Return a floating-point tensor that is computed from the model's outputs."
        raise _loss_error(task, step, f"is {total.dtype}, which has no gradient", remedy)
    if not total.requires_grad:
        which = f"optimizer.{step}" if step else "the optimizer"
        remedy = "Compute it with these parameters, without detach() and no_grad()"
        remedy += ", or exchange the names of the steps." if step else "."
        raise _loss_error(task, step, f"does not depend on the parameters of {which}", remedy)
    return loss


def loss_of(task: Any, outputs: Any, step: str = "") -> Tensor | SumAndCount:
    """Return the loss in what a task returned: a real scalar tensor, or a pair of the sum of losses and their number.

    Raises:
        UserError: there is no loss, or it has another form.
    """
    try:
        loss: Any = outputs["loss"]
    except (KeyError, TypeError, IndexError):
        got = f"a dict with {sorted(map(str, outputs))}" if isinstance(outputs, dict) else f"a {type(outputs).__name__}"
        for_step = f", for the step {step!r}" if step else ""
        raise UserError(
            f"{type(task).__name__}.forward returned {got}, without a 'loss'{for_step}",
            key="task",
            remedy='Return a dict with the scalar to minimise: {"loss": loss}. '
            "An evaluation needs none if task.metrics has a metric.",
        ) from None
    check_form(task, loss, step)
    return loss  # type: ignore[no-any-return]  # `check_form` has checked it


def check_form(task: Any, loss: Any, step: str = "") -> None:
    """Refuse a loss that is not a real scalar tensor or a pair (sum, count). No host sync."""
    is_pair = isinstance(loss, tuple | list) and len(loss) == 2
    total, count = loss if is_pair else (loss, 1)
    if not isinstance(total, Tensor):
        problem = f"is a {type(total).__name__}, not a tensor or a pair (sum, count) with a tensor"
        remedy = 'Return a scalar tensor, {"loss": loss}, without .item() and float().'
    elif total.numel() != 1 or total.is_complex():
        got = "complex" if total.is_complex() else f"a tensor of shape {list(total.shape)}, not one number"
        problem = f"is {got}"
        remedy = "Return one real number: the mean over the samples, loss.mean()."
    elif count.numel() != 1 if isinstance(count, Tensor) else not isinstance(count, int | float):
        got = f"a tensor of shape {list(count.shape)}" if isinstance(count, Tensor) else f"a {type(count).__name__}"
        problem = f"is a pair whose second entry is {got}, not a number of losses"
        remedy = 'Return {"loss": (sum, count)}, or the loss alone: {"loss": loss}.'
    else:
        return
    raise _loss_error(task, step, problem, remedy)


def _loss_error(task: Any, step: str, problem: str, remedy: str) -> UserError:
    of_step = f" in the step {step!r}" if step else ""
    return UserError(f"the loss of {type(task).__name__}{of_step} {problem}", key="task", remedy=remedy)


def empty_batch_error(batch_idx: int) -> UserError:
    """Return the error of a batch without samples, whose mean loss would be NaN."""
    return UserError(
        f"batch {batch_idx} (from 0) of this epoch has no samples",
        key="data.loader.collate_fn",
        remedy="Let it return at least one sample, or leave such samples out of the data set.",
    )
