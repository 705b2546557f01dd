"""Ends a run whose loss is NaN or infinite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping

from hydraloop.engine.progress import Progress
from hydraloop.engine.run import Run
from hydraloop.errors import UserError

log = logging.getLogger(__name__)


class LossCheck:
    """Refuses to continue training with a loss that is not finite.

    A hook may act on it instead (`Hook.checks_loss`), and fp16 skips a step with its gradients.

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
        """Whether the run ends because its loss is not finite; then its objective is NaN. The same on every rank."""
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
        problem = f"the loss is {loss} at iteration {self._progress.iteration} or shortly before"
        may_be_skipped = run.precision.skipped != self._skipped_at_record
        if may_be_skipped or run.settings.allow_nan or any(hook.checks_loss for hook in run.hooks.values()):
            if run.ranks.is_main and not self._has_warned:
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
