"""Ends a run whose loss or weights are NaN or infinite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from hydraloop.engine.progress import Progress
from hydraloop.engine.run import Run
from hydraloop.errors import UserError

log = logging.getLogger(__name__)

_FEW = 3
"""Up to this many weights are named in an error."""


class LossCheck:
    """Refuses to continue training with a loss, and to save or end with weights, that are not finite.

    A hook may act on the loss instead (`Hook.checks_loss`), and fp16 skips a step with its gradients.

    Args:
        run: the parts of the run.
        progress: of the run.
    """

    def __init__(self, run: Run, progress: Progress) -> None:
        self._run, self._progress = run, progress
        self._has_warned = False
        self._skipped_at_record = 0
        self._diverged = False

    @property
    def diverged(self) -> bool:
        """Whether the run ends because its loss or weights are not finite; then its objective is NaN.

        The same on every rank, except that a save in the background is checked on the ranks that write.
        """
        return self._diverged or self._run.precision.diverged

    def end_diverged(self) -> None:
        """Note that the run ends because of its loss; called on every rank."""
        self._diverged = True

    def forget(self) -> None:
        """Forget how an earlier use of the engine has ended."""
        self._diverged = False
        self._run.precision.start()

    def check_record(self, means: Mapping[str, float]) -> None:
        """Check the loss of a record of training.

        Called on every rank with the means over all ranks, so all ranks decide the same. No host sync.

        Raises:
            UserError: the loss is not finite.
        """
        self.check(means.get("loss", 0.0))
        self._skipped_at_record = self._run.precision.skipped

    def check(self, loss: float) -> None:
        """Check the sum of the losses since the last record, of all ranks: before a checkpoint and at the end.

        An infinite loss counts like NaN: its gradients are infinite or NaN, or `grad_clip` makes them 0.

        Raises:
            UserError: it is not finite.
        """
        run = self._run
        if math.isfinite(loss):
            return
        may_be_skipped = run.precision.skipped != self._skipped_at_record
        self._end(
            f"the loss is {loss} at iteration {self._progress.iteration} or shortly before",
            only_warn=may_be_skipped or any(hook.checks_loss for hook in run.hooks.values()),
        )

    def check_weights(self, broken: Sequence[str], iteration: int) -> None:
        """Check the weights of a checkpoint before it is written, and those at the end of training.

        Args:
            broken: the names of those that are not finite (`not_finite`).
            iteration: at which the weights were read.

        Raises:
            UserError: there are some.
        """
        if broken:
            more = f" and {len(broken) - _FEW} more" if len(broken) > _FEW else ""
            self._end(f"weights are NaN or infinite at iteration {iteration}: {', '.join(broken[:_FEW])}{more}")

    def _end(self, problem: str, *, only_warn: bool = False) -> None:
        if only_warn or self._run.settings.allow_nan:
            if self._run.ranks.is_main and not self._has_warned:
                log.warning("%s", problem)
            self._has_warned = True
            return
        self._diverged = True
        raise UserError(
            problem,
            key="engine.allow_nan",
            remedy="Train with a lower optimizer.lr, or with default_hooks.grad_clip.max_norm=1. Or find the operation "
            "that makes it with hooks=anomaly_detection, and the samples with hooks=check_invalid_loss. "
            "To train on, set engine.allow_nan=true.",
        )


def not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the dense tensors with floating-point or complex numbers that have NaN or infinity.

    One pass over the memory, and one host sync.
    """
    found = {
        name: tensor.float() if tensor.itemsize == 1 else tensor  # torch computes nothing in float8
        for name, tensor in tensors.items()
        if (tensor.is_floating_point() or tensor.is_complex()) and tensor.layout is torch.strided
    }
    if get_total_norm(found.values()).isfinite():  # of finite numbers, it may still overflow
        return []
    return [name for name, tensor in found.items() if not tensor.isfinite().all()]
