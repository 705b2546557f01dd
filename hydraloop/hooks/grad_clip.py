"""GradClipHook: clips the gradients before each optimizer step."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from hydraloop.engine.distributed.fsdp import whole
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Priority
from hydraloop.errors import UserError
from hydraloop.schemas.option_checks import check_above

log = logging.getLogger(__name__)

_MOST_SKIPPED = 10
"""Skipped steps in a row that end the run."""


class GradClipHook(Hook):
    """Clips the gradients of all parameters of the optimizer, by their total norm or by value.

    With several optimizers, the norm is that of all of them, because they share one backward. If the task has steps,
    each step is clipped by itself, with the same limit, and the record has `<step>/grad_norm`.

    It runs once per accumulation window, after the gradients are unscaled (fp16) and weighted (accumulation), so that
    the limit means the same in every run. For a sharded model, the norm is that of all shards. The record contains the
    mean of the norms before clipping as `grad_norm`, without steps that are skipped.

    With `skip_nonfinite`, an optimizer step is skipped on all ranks if its gradient norm is NaN or infinite. Weights,
    momentum and weight decay stay as they are; the step does not count for schedules and averages of weights, and its
    loss does not end the run. A line in the log says so, and the record has the number of skipped steps of the run as
    `skipped`. After 10 skipped steps in a row, the run fails. With fp16, the rule of the loss scale applies instead:
    it skips such steps anyway. Without `max_norm`, `clip_value` and `skip_nonfinite`, the hook does nothing.

    Priority ABOVE_NORMAL: hooks of normal priority then see the gradients that the step uses. No host sync, except one
    per step with `skip_nonfinite`, and one for each sparse gradient. Without `max_norm`, the norm costs a pass over the
    gradients; with `clip_value`, no gradient may be sparse. No state. Options: `GradClipHookConf`. From MMCV's and
    iMIX's OptimizerHook (`grad_clip`), with torch's functions; off by default, as there.

    Raises:
        UserError: a number is out of range, or `max_norm` and `clip_value` are both set.
    """

    priority = Priority.ABOVE_NORMAL
    collective = True  # all ranks gather their shards

    def __init__(
        self,
        *,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        clip_value: float | None = None,
        skip_nonfinite: bool = False,
    ) -> None:
        check_above(0, norm_type=norm_type)
        check_above(0, "null to switch it off", max_norm=max_norm, clip_value=clip_value)
        if max_norm is not None and clip_value is not None:
            raise UserError(
                "gradients are clipped by norm or by value, but both are set",
                key="clip_value",
                remedy="Set max_norm or clip_value to null.",
            )
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.clip_value = clip_value
        self.skip_nonfinite = skip_nonfinite
        self._skips = False
        self._in_a_row: Counter[str] = Counter()
        """By step of the task: how many optimizer steps in a row were skipped."""
        self._norms: list[tuple[str, Tensor, int]] = []
        """Of the steps of this iteration: the step, the norm, and how many optimizer steps fp16 had skipped before."""
        if max_norm is None and clip_value is None and not skip_nonfinite:
            self.idle_points = ("before_train", "before_optimizer_step", "after_train_iter")

    def before_train(self, engine: Engine) -> None:
        """Begin to count skipped steps.

        Raises:
            UserError: the optimizer has a closure, with which no step can be skipped.
        """
        self._in_a_row.clear()
        self._skips = self.skip_nonfinite and engine.run.precision.name != "fp16"
        if self._skips and engine.stepper.uses_closure:
            raise UserError(
                f"the step of {type(engine.optimizer).__name__} computes the loss several times and cannot be skipped",
                key=f"{self.key}.skip_nonfinite",
                remedy=f"Set {self.key}.skip_nonfinite=false.",
            )

    def before_optimizer_step(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Clip, or skip the step.

        Raises:
            UserError: too many steps in a row were skipped.
        """
        stepper = engine.stepper
        parameters = [parameter for group in stepper.optimizer.param_groups for parameter in group["params"]]
        norm = total_norm(parameters, self.norm_type)
        if self._skips:
            value = float(whole(norm))
            if not math.isfinite(value):
                self._skip(engine, value)
                return
            self._in_a_row[stepper.task_step] = 0
        if self.max_norm is not None:
            clip_grads_with_norm_(parameters, self.max_norm, norm)
        elif self.clip_value is not None:
            clip_grad_value_(parameters, self.clip_value)
        self._norms.append((stepper.task_step, whole(norm), engine.run.precision.skipped))

    def _skip(self, engine: Engine, norm: float) -> None:
        """Skip the step. All ranks have the same gradients, or the norm of all shards, and do the same."""
        stepper, iteration = engine.stepper, engine.progress.iteration + 1
        stepper.skip_step()
        self._in_a_row[stepper.task_step] += 1
        if self._in_a_row[stepper.task_step] == _MOST_SKIPPED:
            engine.loss_check.end_diverged()
            saved = engine.checkpoints.last_checkpoint
            earlier = "" if saved is None else f"Add resume={saved} seed={engine.run.seed + 1}: other batches follow. "
            raise UserError(
                f"{_MOST_SKIPPED} steps in a row, to iteration {iteration}, had gradients that are NaN or infinite",
                key=f"{self.key}.skip_nonfinite",
                remedy=f"{earlier}Train with a lower optimizer.lr.",
            )
        if engine.distributed.is_main:
            of_step = f" of the step {stepper.task_step}" if stepper.task_step else ""
            log.warning("iteration %d: the gradient norm%s is %s, so the step is skipped", iteration, of_step, norm)

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Add the norm of each step that was taken to the record, which is known here without a host sync."""
        skipped = [before for _, _, before in self._norms[1:]] + [engine.run.precision.skipped]
        for (step, norm, before), after in zip(self._norms, skipped, strict=False):
            if before == after:
                engine.messages.add(f"{step}/grad_norm" if step else "grad_norm", norm)
        self._norms = []


def total_norm(parameters: Iterable[Tensor], norm_type: float) -> Tensor:
    """Return the norm of all gradients; of a sharded model, a DTensor. Called on every rank."""
    gradients = [_entries(parameter) for parameter in parameters if parameter.grad is not None]
    return get_total_norm(gradients, norm_type)


def _entries(parameter: Tensor) -> Tensor:
    """Return the gradient; if it is sparse, those of its entries that are stored."""
    gradient = parameter.grad
    assert gradient is not None
    if not gradient.is_sparse:
        return gradient
    gradient = gradient.coalesce()  # an entry may be stored as several summands
    return gradient.values()
