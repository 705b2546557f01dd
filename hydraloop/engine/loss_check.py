"""Ends a run whose loss or weights are NaN or infinite."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from hydraloop.engine.run_parts import Run
from hydraloop.errors import UserError

log = logging.getLogger(__name__)

_FEW = 3
"""Up to this many weights are named in an error."""
_MOST = 1000
"""Iterations without a check, after which one is made: each keeps a tensor."""


class BadLoss(NamedTuple):
    """The first loss of a rank that is not finite."""

    iteration: int
    """From 1."""
    epoch: int
    """From 0."""
    batch_idx: int
    """The batch in the epoch, from 0."""
    step: str
    """The step of the task; empty if it has no steps."""
    loss: float
    noticed: int
    """The iteration of the newest loss when the losses were checked."""


class LossCheck:
    """Refuses to continue training with a loss, and to save or end with weights, that are not finite.

    The losses are kept on their device, without a host sync, and checked at each record, before a checkpoint and at the
    end of training. The loss of an optimizer step that is skipped (fp16, `skip_step`) does not count, so a window is
    checked after its hooks have decided.

    Args:
        run: the parts of the run.
    """

    def __init__(self, run: Run) -> None:
        self._run, self._progress = run, run.progress
        self._has_warned = self._diverged = False
        self._kept: list[tuple[int, int, int, str, Tensor]] = []
        self._open: list[tuple[int, int, int, str, Tensor]] = []
        """The losses of the open accumulation window."""
        self._unchecked = 0
        """Iterations since the last check, the same on every rank."""
        self._checks_at_step = False
        """Whether a hook wants a check before the next optimizer step."""
        self.fail: Callable[[BadLoss | None, int], None] = self._fail
        """Called on every rank with this rank's first loss that is not finite, and with the rank that had one first. A
        hook may replace it by a function that raises an error with more in it."""

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
        """Forget an earlier use of the engine: its losses, and how it has ended."""
        self._diverged = False
        self._kept, self._open, self._unchecked = [], [], 0
        self._checks_at_step = False
        self._run.precision.diverged = False

    def keep(self, batch_idx: int, step: str, loss: Tensor | None) -> None:
        """Keep the loss of the current iteration. No host sync.

        Args:
            batch_idx: in the epoch, from 0.
            step: of the task.
            loss: one value of any shape, detached; None: the batch is a filler, whose loss may be NaN.
        """
        if loss is not None:
            self._open.append((self._progress.iteration + 1, self._progress.epoch, batch_idx, step, loss))
        self._unchecked += 1

    def check_at_step(self) -> None:
        """Ask for a check before the next optimizer step that no hook skips; called on every rank."""
        self._checks_at_step = True

    def before_step(self) -> None:
        """Make the check that `check_at_step` has asked for. With fp16, the step may still be skipped.

        Raises:
            UserError: as `check`.
        """
        if self._checks_at_step:
            self._checks_at_step = False
            if self._run.precision.name != "fp16":
                self._kept += self._open
                self._open = []
            self.check()

    def end_window(self, *, stepped: bool) -> None:
        """Let the losses of the accumulation window count if its optimizer step was taken.

        Raises:
            UserError: there was no check for a long time, and a loss is not finite.
        """
        if stepped:
            self._kept += self._open
        self._open = []
        if self._unchecked >= _MOST:
            self.check()

    def check_record(self, means: Mapping[str, float]) -> None:
        """Check the losses of a record of training.

        Called on every rank with the means over all ranks, so all ranks decide the same. No host sync if the mean of
        the losses is finite.

        Raises:
            UserError: a loss is not finite.
        """
        if math.isfinite(means.get("loss", math.nan)):
            self._kept, self._unchecked = [], 0
        else:
            self.check()

    def check(self) -> None:
        """Check the losses since the last check; called on every rank.

        One host sync, and with several ranks one exchange between the hosts.

        Raises:
            UserError: a loss is not finite. An infinite one counts like NaN: its gradients are infinite or NaN, or
                `grad_clip` makes them 0.
        """
        ranks = self._run.ranks
        bad = self.first()
        iterations = [0] * ranks.world_size
        iterations[ranks.rank] = 0 if bad is None else bad.iteration
        self.judge(bad, ranks.sum(torch.tensor(iterations)).tolist() if ranks.world_size > 1 else iterations)

    def first(self) -> BadLoss | None:
        """Return the first loss of this rank that is not finite; None without one. One host sync."""
        kept = self._kept
        scalars = [loss.reshape(()) if loss.ndim else loss for *_, loss in kept]  # reshape takes 1 µs
        losses: list[float] = torch.stack(scalars).tolist() if kept else []
        at = next((at for at, loss in enumerate(losses) if not math.isfinite(loss)), None)
        return None if at is None else BadLoss(*kept[at][:-1], losses[at], noticed=kept[-1][0])

    def judge(self, bad: BadLoss | None, iterations: Sequence[int]) -> None:
        """End the run if a rank has a loss that is not finite; called on every rank.

        Args:
            bad: the `first` of this rank.
            iterations: those of all ranks; 0: none.

        Raises:
            UserError: there is one.
        """
        if any(iterations):
            # A NaN reaches the other ranks with the gradients, so the origin is the rank that had it first.
            self.fail(bad, min((iteration, rank) for rank, iteration in enumerate(iterations) if iteration)[1])
        self._kept, self._unchecked = [], 0

    def _fail(self, bad: BadLoss | None, culprit: int) -> None:
        mine = "" if bad is None else f"the loss{of_step(bad)} is {bad.loss} at iteration {bad.iteration}"
        self._end(self._run.ranks.gather(mine)[culprit])

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

    def _end(self, problem: str) -> None:
        if self._run.settings.allow_nan:
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


def of_step(bad: BadLoss) -> str:
    """Return the words that name the step of a loss; empty if the task has no steps."""
    return f" of the step {bad.step}" if bad.step else ""


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
