"""Stepper: forward, backward and the optimizer step. No other file does them in training."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, optim

from hydraloop.engine.batches import Batches, Window
from hydraloop.engine.loaders import has_exact_sizes, share_of
from hydraloop.engine.loss_check import LossCheck
from hydraloop.engine.loss_weighting import LossWeighting, empty_batch_error, loss_to_minimise, mean_and_weight, mean_of
from hydraloop.engine.run import Run
from hydraloop.errors import UserError

Outputs = dict[str, Any]


class Stepper:
    """Trains a task on its batches: forward and backward for each batch, an optimizer step for each window.

    A hook calls `skip_step` in before_optimizer_step to skip a step, for example if the norm of the gradients is NaN.

    Args:
        run: the parts of the run.
        batches: of training.
        loss_check: gets the losses.
    """

    wraps: ClassVar[bool] = True
    """Whether DDP wraps the task to average its gradients."""

    def __init__(self, run: Run, batches: Batches, loss_check: LossCheck) -> None:
        self._task = run.task
        self._ranks = run.ranks
        self._precision = run.precision
        self._calls = run.calls
        self._batches = batches
        self._loss_check = loss_check
        self.accumulate = run.settings.accumulate
        """Iterations in an optimizer step."""

        self._is_wrapped = self.wraps and run.trained_by is not None
        if not (self._is_wrapped or self._ranks.sharded):
            self._ranks.start_equal(self._task)
        self._forward = self._precision.forward(self._ranks.wrap(self._task) if self._is_wrapped else self._task)

        # In a single process without accumulation, each loss counts as it is.
        self._weighting: LossWeighting | None = None
        if self.accumulate > 1 or self._ranks.world_size > 1:
            self._weighting = LossWeighting(self.accumulate, self._ranks, run.device)
        self._hooks_may_change_batches = any(
            hook.overrides("before_train_iter") or hook.overrides("before_iter") for hook in run.hooks.values()
        )

        self._all_optimizers = cast("optim.Optimizer", run.trained_by)  # None if the engine only evaluates
        self.optimizer = self._all_optimizers
        """The optimizer whose gradients are computed; outside of the steps of a task, all of them as one."""
        self.repeats = run.trained_by is not None and needs_closure(run)
        """Whether the optimizer repeats the forward and backward pass in its step (LBFGS)."""
        self.step = ""
        """The name of the task's step that is being done; empty outside of steps."""
        self.stepped = False
        """Whether an optimizer stepped in the iteration just completed."""
        self.window_closed = True
        """Whether the accumulation window is closed, so that there are no gradients before an optimizer step."""
        self._skip_requested = False
        self._is_first_batch = True

        self.batch_samples = 0
        """This rank's samples in the current batch; 0 for a filler batch, which only other ranks count."""
        self.samples_of_all = 0
        """The samples of all ranks in the current batch."""
        self.loss_weights: dict[str, float | Tensor] = {}
        """By name in the outputs (`loss`, `<step>/loss`), the weight of this rank's loss in a mean over iterations and
        ranks: the samples of the batch, or the number of losses that the task returned with their sum; 0 for a
        filler."""

    def start(self) -> None:
        """Begin to train, on every rank: forget the gradients and the open window of an earlier use."""
        if self._weighting is not None:
            loader = self._batches.loaders.train
            own_count = getattr(self._task, "counts_its_own_samples", True)
            is_exact = has_exact_sizes(loader) and not self._hooks_may_change_batches and not own_count
            self._weighting.samples_at = share_of(loader)
            self._weighting.sizes_are_exact = all(self._ranks.gather(is_exact))
        if self._all_optimizers is not None:
            self._all_optimizers.zero_grad()
        self.optimizer = self._all_optimizers
        self.step = ""
        self.window_closed = True

    def train_batch(self, window: Window, batch_idx: int, batch: Any) -> Outputs:
        """Train on one batch of a window; the last batch ends with the optimizer step. No host sync of its own.

        Returns:
            What the task returned, with `loss` detached.
        """
        ends_window = batch_idx == window[-1]
        if self._weighting is not None and batch_idx == window[0]:
            self._weighting.begin_window(window)

        # Forward and backward. The gradients are added to those of the earlier batches of the window.
        outputs = self._forward_backward(batch_idx, batch, ends_window=ends_window)
        loss = outputs["loss"]
        outputs["loss"] = loss.detach()
        self._loss_check.keep(batch_idx, self.step, outputs["loss"] if self.batch_samples else None)
        self._calls.after_backward(batch_idx, batch, outputs)

        # One optimizer step for the whole window.
        self.stepped = ends_window and self._optimizer_step(batch_idx, batch, outputs)
        self.window_closed = ends_window

        if self._is_first_batch:
            self._is_first_batch = False
            self._ranks.first_step_done()
        return outputs

    def _optimizer_step(self, batch_idx: int, batch: Any, outputs: Outputs) -> bool:
        """End a window. Return whether the step was taken, and not skipped."""
        # Bring the gradients to their true size: without the loss scale of fp16, and as the mean over all terms.
        self._precision.unscale(self.optimizer)
        if self._weighting is not None:
            self._weighting.correct(self.optimizer)

        # Hooks clip or inspect the gradients here, and may call `skip_step`.
        self._skip_requested = False
        self._calls.before_optimizer_step(batch_idx, batch, outputs)

        if self._skip_requested:
            self._precision.skip()
            stepped = False
        elif self.repeats:
            self._step_with_closure(batch_idx, batch, outputs)
            stepped = True
        else:
            stepped = self._precision.step(self.optimizer)  # fp16 skips the step if a gradient has overflowed

        # Optimizer.zero_grad also calls the profiler, which takes 4 % of an iteration of a small model.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self._loss_check.close_window(stepped=stepped)
        return stepped

    def skip_step(self) -> None:
        """Skip the optimizer step of this window; called in before_optimizer_step, on every rank.

        Schedules and averages of weights do not advance, and `loss_check` ignores the losses of the window.

        Raises:
            RuntimeError: the optimizer computes the loss several times in a step (LBFGS, SAM).
        """
        if self.repeats:
            raise RuntimeError(
                f"{type(self.optimizer).__name__} computes the loss several times in a step, and calls "
                "before_optimizer_step each time, so the step cannot be skipped"
            )
        self._skip_requested = True

    def _forward_backward(self, batch_idx: int, batch: Any, *, ends_window: bool) -> Outputs:
        """Add the gradients of a batch to those of its window. The returned `loss` is the mean over the batch."""
        samples = self._task.num_samples(batch)
        if not samples:
            raise empty_batch_error(batch_idx)
        self.batch_samples = self.samples_of_all = samples
        if self._weighting is not None:
            self._weighting.begin_batch(batch_idx, samples)
            self.batch_samples = self._weighting.samples
            self.samples_of_all = self._weighting.samples_of_all
            self._ranks.sync_gradients(ends_window)

        outputs: Outputs = self._forward(batch, step=self.step) if self.step else self._forward(batch)
        loss = loss_to_minimise(self._task, outputs, self.step)
        mean, weight = mean_and_weight(loss, self.batch_samples)
        self.loss_weights[f"{self.step}/loss" if self.step else "loss"] = weight

        if self._weighting is None:
            self._precision.backward(mean)
        else:
            weighted = self._weighting.weigh(loss, self.step)
            if ends_window:
                self._weighting.close_window()
            self._precision.backward(weighted)
        outputs["loss"] = mean
        return outputs

    def rewrap(self) -> None:
        """Wrap the task again after `requires_grad` of parameters has changed, on every rank.

        DDP averages only the gradients of parameters that required them when it wrapped the task.

        Raises:
            RuntimeError: called inside an accumulation window, whose gradients would be lost.
        """
        if not self.window_closed:
            raise RuntimeError("call rewrap between two accumulation windows")
        if self._is_wrapped:
            self._forward = self._task  # so that `wrap` can free the old wrapper
            self._forward = self._precision.forward(self._ranks.wrap(self._task, is_first=False))

    # Optimizers whose `step` calls a closure, which repeats forward and backward: LBFGS and SAM. ----------------------

    def _step_with_closure(self, batch_idx: int, batch: Any, outputs: Outputs) -> None:
        """Take a step of an optimizer that asks for losses and gradients. It always takes the step."""
        optimizer = self.optimizer
        logged = dict(self._task.logged)
        weight = self.loss_weights["loss"]
        # LBFGS first asks at the current weights, whose loss and gradients are there. SAM moves the weights first.
        is_computed = isinstance(optimizer, optim.LBFGS)

        @torch.enable_grad()  # `step` runs without gradients
        def closure() -> Any:  # torch's types say that it returns a float
            nonlocal is_computed
            if is_computed:
                is_computed = False
                return self._mean_over_ranks(outputs["loss"])
            optimizer.zero_grad()
            if self._weighting is not None:
                self._weighting.begin_window((batch_idx,))
            repeated = self._forward_backward(batch_idx, batch, ends_window=True)
            repeated["loss"] = repeated["loss"].detach()
            if self._weighting is not None:
                self._weighting.correct(optimizer)
            self._calls.before_optimizer_step(batch_idx, batch, repeated)
            return self._mean_over_ranks(repeated["loss"])

        optimizer.step(closure)

        # Records have the values of the iteration's own forward. Hooks have the dict.
        self._task.logged.clear()
        self._task.logged.update(logged)
        self.loss_weights["loss"] = weight

    def _mean_over_ranks(self, mean: Tensor) -> Tensor:
        """Return the mean loss of all ranks, the same on each: the optimizer's number of calls may depend on it."""
        if self._ranks.world_size == 1:
            return mean
        mean = mean.reshape(()) if self.batch_samples else torch.zeros_like(mean).reshape(())  # a filler's may be NaN
        count = torch.as_tensor(self.loss_weights["loss"], dtype=mean.dtype, device=mean.device).reshape(())
        total, count = self._ranks.sum(torch.stack((mean * count, count)))
        return mean_of((total, count))


def needs_closure(run: Run) -> bool:
    """Return whether the optimizer of a run needs a closure.

    Raises:
        UserError: it needs one, and the run has several optimizers, fp16, accumulation or FSDP2.
    """
    name, optimizer = next(
        ((name, one) for name, one in run.optimizers.items() if _has_closure(one, run.settings.closures.get(name))),
        ("", None),
    )
    if optimizer is None:
        return False
    for is_used, what, key, remedy in (
        (len(run.optimizers) > 1, "several optimizers", f"optimizer.{name}", "Use it as the only optimizer."),
        (run.precision.name == "fp16", "fp16", "precision", "Use precision=bf16 or precision=fp32."),
        (run.settings.accumulate > 1, "accumulation", "engine.accumulate", "Use 1, and larger batches."),
        (run.ranks.sharded, "FSDP2", "distributed.strategy", "Use distributed.strategy=ddp."),
    ):
        if is_used:
            problem = f"{type(optimizer).__name__} evaluates the loss several times in a step"
            raise UserError(f"{problem}, which is not possible with {what}", key=key, remedy=remedy)
    return True


def _has_closure(optimizer: optim.Optimizer, option: bool | None) -> bool:
    """Return whether the option says so, or without it, whether `step` requires the argument."""
    if option is not None:
        return option
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
