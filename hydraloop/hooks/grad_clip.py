"""GradClipHook: clips the gradients before each optimizer step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn.utils import clip_grad_value_, clip_grads_with_norm_, get_total_norm

from hydraloop.engine.distributed.fsdp import largest_entry, whole
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Priority
from hydraloop.errors import UserError
from hydraloop.option_checks import check_above

if TYPE_CHECKING:
    from torch.optim import Optimizer


class GradClipHook(Hook):
    """Clips the gradients of all parameters of the optimizer, by their total norm or by value.

    With several optimizers, the norm is that of all of them, because they share one backward. If the task has steps,
    each step is clipped by itself, with the same limit, and the record has `<step>/grad_norm`.

    It runs once per accumulation window, after the gradients are unscaled (fp16) and weighted (accumulation), so that
    the limit means the same in every run. For a sharded model, the norm is that of all shards. The record contains the
    mean of the norms before clipping as `grad_norm`, without steps that fp16 skips. Without `max_norm` and
    `clip_value`, the hook does nothing.

    Priority ABOVE_NORMAL: hooks of normal priority then see the gradients that the step uses. No host sync, except one
    per step with `error_if_nonfinite`, and one for each sparse gradient. With `clip_value`, the norm for the record
    costs a pass over the gradients, and no gradient may be sparse. No state. Options: `GradClipHookConf`. From MMCV's
    and iMIX's OptimizerHook (`grad_clip`), with torch's functions; off by default, as there.

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
        error_if_nonfinite: bool = False,
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
        self.error_if_nonfinite = error_if_nonfinite
        self._parameters: dict[Optimizer, list[Tensor]] = {}
        self._norms: list[tuple[str, Tensor, int]] = []
        """Of the steps of this iteration: the step, the norm, and how many optimizer steps fp16 had skipped before."""
        if max_norm is None and clip_value is None:
            self.idle_points = ("before_train_epoch", "before_optimizer_step", "after_train_iter")

    def before_train_epoch(self, engine: Engine) -> None:
        """List the parameters; groups may have been added since the last epoch."""
        self._parameters = {
            optimizer: [parameter for group in optimizer.param_groups for parameter in group["params"]]
            for optimizer in (engine.optimizer, *engine.run.optimizers.values())
        }

    def before_optimizer_step(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Clip.

        Raises:
            RuntimeError: the norm is not finite, with `error_if_nonfinite`.
        """
        stepper = engine.stepper
        parameters = self._parameters[stepper.optimizer]
        norm = total_norm(engine, parameters, self.norm_type, error_if_nonfinite=self.error_if_nonfinite)
        if self.max_norm is not None:
            clip_grads_with_norm_(parameters, self.max_norm, norm)
        elif self.clip_value is not None:
            clip_grad_value_(parameters, self.clip_value)
        self._norms.append((stepper.step, whole(norm), engine.run.precision.skipped))

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Add the norm of each step that was taken to the record, which is known here without a host sync."""
        skipped = [before for _, _, before in self._norms[1:]] + [engine.run.precision.skipped]
        for (step, norm, before), after in zip(self._norms, skipped, strict=False):
            if before == after:
                engine.messages.add(f"{step}/grad_norm" if step else "grad_norm", norm)
        self._norms = []


def total_norm(
    engine: Engine, parameters: Iterable[Tensor], norm_type: float, *, error_if_nonfinite: bool = False
) -> Tensor:
    """Return the norm of all gradients; of a sharded model, a DTensor. Called on every rank."""
    gradients = [_entries(parameter) for parameter in parameters if parameter.grad is not None]
    if not (engine.run.ranks.sharded and math.isinf(norm_type)):
        return get_total_norm(gradients, norm_type, error_if_nonfinite=error_if_nonfinite)
    norm = largest_entry(gradients)
    if error_if_nonfinite and not whole(norm).isfinite():
        raise RuntimeError("the largest entry of the gradients is not finite, and error_if_nonfinite is set")
    return norm


def _entries(parameter: Tensor) -> Tensor:
    """Return the gradient; if it is sparse, those of its entries that are stored."""
    gradient = parameter.grad
    assert gradient is not None
    if not gradient.is_sparse:
        return gradient
    gradient = gradient.coalesce()  # an entry may be stored as several summands
    return gradient.values()
