"""The accumulation window: which iterations share an optimizer step, and how much each counts in it."""

from __future__ import annotations

import torch
from torch import Tensor, optim


class Window:
    """The iterations since the last optimizer step.

    The loss of a batch is its samples' mean, so in a window each batch counts by its samples. How many the window will
    have is not known before its end: all batches are taken to be as large as the first, and gradients are corrected
    once, at the end, where they were not. So a full window costs nothing, and a short one (an epoch's last) is exact.

    Args:
        length: iterations in a full window, more than 1; a run that steps every iteration has no window.
    """

    def __init__(self, length: int) -> None:
        self.length = length
        self._size = self._samples = self._expected = 0

    def closes(self, *, last: bool) -> bool:
        """Whether the iteration that is under way ends the window; `last` ends any."""
        return last or self._size + 1 == self.length

    def weigh(self, loss: Tensor, samples: int) -> Tensor:
        """The loss to backpropagate for a batch of `samples`, counted into the window."""
        if self._size == 0:
            self._expected = samples * self.length
        self._size += 1
        self._samples += samples
        return loss * (samples / self._expected)

    def correct(self, optimizer: optim.Optimizer) -> None:
        """Bring the gradients of a closing window to the mean over the samples it had; then it is empty."""
        if self._samples != self._expected:
            gradients = [
                parameter.grad
                for group in optimizer.param_groups
                for parameter in group["params"]
                if parameter.grad is not None
            ]
            torch._foreach_mul_(gradients, self._expected / self._samples)
        self._size = self._samples = self._expected = 0
