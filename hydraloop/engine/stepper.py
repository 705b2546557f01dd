"""Stepper: forward, backward and the optimizer step. No other file does them in training."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, optim

from hydraloop.engine.batches import Batches, Window
from hydraloop.engine.loss_check import LossCheck
from hydraloop.engine.loss_weighting import LossWeighting, empty_batch_error, loss_to_minimise, mean_and_weight, mean_of
from hydraloop.engine.run_parts import Run
from hydraloop.errors import UserError

Outputs = dict[str, Any]


class Stepper:
    """Trains a task on its batches: forward and backward for each batch, an optimizer step for each window.

    A window is the `accumulate` batches of one optimizer step. A hook calls `skip_step` to skip a step, for example if
    the norm of the gradients is NaN.

    Args:
        run: the parts of the run.
        batches: of training.
        loss_check: gets the losses.
    """

    wraps: ClassVar[bool] = True
    """Whether DDP wraps the task to average its gradients; False: the class averages them itself."""

    def __init__(self, run: Run, batches: Batches, loss_check: LossCheck) -> None:
        self._task = run.task
        self._ranks = run.ranks
        self._precision = run.precision
        self._calls = run.calls
        self._batches = batches
        self._loss_check = loss_check
        self.accumulate = run.settings.accumulate
        """Iterations in an optimizer step."""

        self._is_wrapped = self.wraps and run.optimizer_or_none is not None
        if not (self._is_wrapped or self._ranks.sharded):
            self._ranks.broadcast_weights(self._task)
        self._forward = self._precision.forward(self._ranks.wrap(self._task) if self._is_wrapped else self._task)

        # In a single process without accumulation, a step has one loss, which needs no weight.
        self._weighting: LossWeighting | None = None
        if self.accumulate > 1 or self._ranks.world_size > 1:
            self._weighting = LossWeighting(self.accumulate, self._ranks, run.device)
        # `before_iter` is before_train_iter and its counterparts in evaluation, in one method.
        self._hooks_may_change_batches = any(
            hook.overrides("before_train_iter") or hook.overrides("before_iter") for hook in run.hooks.values()
        )

        # The optimizer of the run, or all of them as one. None if the engine only evaluates, which does not use it.
        self._all_optimizers = cast("optim.Optimizer", run.optimizer_or_none)
        self.optimizer = self._all_optimizers
        """The optimizer whose gradients are computed: all, as one; in a step of the task its optimizer (`TaskStepper`
        sets it)."""
        self.uses_closure = run.optimizer_or_none is not None and needs_closure(run)
        """Whether the optimizer repeats the forward and backward pass in its step (LBFGS, SAM)."""
        self.task_step = ""
        """The name of the current step of the task, such as `generator` (`TaskStepper` sets it); empty if the task has
        no steps, or between iterations."""
        self.stepped = False
        """Whether an optimizer stepped in the iteration just completed."""
        self.window_closed = True
        """True between two windows, when no gradients wait for an optimizer step. False from the first forward of a
        window until its step is done."""
        self._skip_requested = False
        self._is_first_window = True

        self.local_samples = 0
        """Samples of this rank in the current batch; 0 for a filler.

        In the last global batch of an epoch, a rank may have no samples. Its batch is then a filler: samples of other
        ranks, with which it takes part in collectives, and which do not count."""
        self.global_samples = 0
        """Samples of all ranks in the current batch, without fillers."""
        self.loss_weights: dict[str, float | Tensor] = {}
        """For averaging logged losses over iterations and ranks: the number of terms in each loss of this rank, by its
        name in the outputs (`loss`, `<step>/loss`). The number that the task returned, otherwise `local_samples`; 0 for
        a filler."""

    def start(self) -> None:
        """Begin to train, on every rank: drop the gradients and the open window of an aborted `train`."""
        if self._weighting is not None:
            may_differ = self._hooks_may_change_batches or getattr(self._task, "counts_its_own_samples", True)
            self._weighting.begin_training(self._batches.loaders.train, may_differ=may_differ)
        if self._all_optimizers is not None:
            self._all_optimizers.zero_grad()
        self.optimizer = self._all_optimizers
        self.task_step = ""
        self.window_closed = True

    def train_batch(self, window: Window, batch_idx: int, batch: Any) -> Outputs:
        """Train on one batch of a window; after the last batch, take the optimizer step.

        No host sync, except in hooks and in each optimizer step of fp16; rarely, to check the loss.

        Returns:
            What the task returned, with `loss` detached.
        """
        ends_window = batch_idx == window[-1]
        if batch_idx == window[0]:
            self._skip_requested = False
            if self._weighting is not None:
                self._weighting.begin_window(window)
        self.window_closed = False

        # Forward and backward. The gradients are added to those of the earlier batches of the window.
        outputs = self._forward_backward(batch_idx, batch, ends_window=ends_window)
        loss = outputs["loss"]
        outputs["loss"] = loss.detach()
        self._loss_check.keep(batch_idx, self.task_step, outputs["loss"] if self.local_samples else None)
        self._calls.after_backward(batch_idx, batch, outputs)

        # One optimizer step for the whole window.
        self.stepped = ends_window and self._optimizer_step(batch_idx, batch, outputs)
        self.window_closed = ends_window

        # The first window may be slow (compilation), and ranks wait for each other at its end. From now on, a rank that
        # hangs is noticed sooner.
        if self._is_first_window and ends_window:
            self._is_first_window = False
            self._ranks.lower_timeout()
        return outputs

    def _optimizer_step(self, batch_idx: int, batch: Any, outputs: Outputs) -> bool:
        """Take the optimizer step of a window. Return False if it was skipped."""
        # Divide the gradients by the loss scale of fp16. Then scale them to the mean loss over all samples of the
        # window on all ranks (or over all terms, if the task returns a sum and their number).
        self._precision.unscale(self.optimizer)
        if self._weighting is not None:
            self._weighting.rescale_gradients(self.optimizer)

        # Hooks clip or inspect the gradients here, and may call `skip_step`.
        self._calls.before_optimizer_step(batch_idx, batch, outputs)

        if self._skip_requested:
            self._precision.skip()
            stepped = False
        else:
            self._loss_check.before_step()
            if self.uses_closure:
                self._step_with_closure(batch_idx, batch, outputs)
                stepped = True
            else:
                stepped = self._precision.step(self.optimizer)  # fp16 skips the step if a gradient has overflowed

        # Drop the gradients. Optimizer.zero_grad also calls the profiler: 4 % of an iteration of a small model.
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None
        self._loss_check.end_window(stepped=stepped)
        return stepped

    def skip_step(self) -> None:
        """Skip the optimizer step of this window; called in after_backward or before_optimizer_step, on every rank.

        Schedules and averages of weights do not advance, and `loss_check` ignores the losses of the window.

        Raises:
            RuntimeError: no window is open, or the optimizer computes the loss several times in a step (LBFGS, SAM).
        """
        if self.window_closed:
            raise RuntimeError("call skip_step in after_backward or before_optimizer_step")
        if self.uses_closure:
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
        self.local_samples = self.global_samples = samples
        if self._weighting is not None:
            self._weighting.begin_batch(batch_idx, samples)
            self.local_samples = self._weighting.local_samples
            self.global_samples = self._weighting.global_samples
            self._ranks.sync_gradients(ends_window)

        outputs: Outputs = self._forward(batch, step=self.task_step) if self.task_step else self._forward(batch)
        # The mean over the samples, or a pair: the sum over the terms of the loss (such as tokens), and their number.
        mean_or_pair = loss_to_minimise(self._task, outputs, self.task_step)
        mean, weight = mean_and_weight(mean_or_pair, self.local_samples)
        self.loss_weights[f"{self.task_step}/loss" if self.task_step else "loss"] = weight

        if self._weighting is None:
            self._precision.backward(mean)
        else:
            # weighted = sum of the batch's losses * ranks / number of terms of the window on all ranks
            weighted = self._weighting.weigh(mean_or_pair, self.task_step)
            if ends_window:  # all terms are counted now; their sum over the ranks overlaps with the last backward
                self._weighting.start_summing_terms()
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
        """Take the step of an optimizer that calls a closure for each loss and its gradients."""
        optimizer = self.optimizer
        logged = dict(self._task.logged)
        weight = self.loss_weights["loss"]
        # LBFGS calls the closure first at the current weights, for which the loss and the gradients have just been
        # computed. SAM moves the weights before it calls the closure.
        reuse_first = isinstance(optimizer, optim.LBFGS)

        @torch.enable_grad()  # optimizers run `step` under torch.no_grad
        def closure() -> Any:  # a tensor; torch's annotation of `step` says float
            nonlocal reuse_first
            if reuse_first:
                reuse_first = False
                return self._mean_over_ranks(outputs["loss"])
            optimizer.zero_grad()
            if self._weighting is not None:
                self._weighting.begin_window((batch_idx,))
            repeated = self._forward_backward(batch_idx, batch, ends_window=True)
            repeated["loss"] = repeated["loss"].detach()
            if self._weighting is not None:
                self._weighting.rescale_gradients(optimizer)
            self._calls.before_optimizer_step(batch_idx, batch, repeated)
            return self._mean_over_ranks(repeated["loss"])

        optimizer.step(closure)

        # Records get the values of the first forward. The dict itself stays: `runtime_info` keeps a reference to it.
        self._task.logged.clear()
        self._task.logged.update(logged)
        self.loss_weights["loss"] = weight

    def _mean_over_ranks(self, mean: Tensor) -> Tensor:
        """Return the mean loss of all ranks. All ranks need the same value: LBFGS decides by it how often it calls."""
        if self._ranks.world_size == 1:
            return mean
        mean = mean.reshape(()) if self.local_samples else torch.zeros_like(mean).reshape(())  # a filler's may be NaN
        count = torch.as_tensor(self.loss_weights["loss"], dtype=mean.dtype, device=mean.device).reshape(())
        total, count = self._ranks.sum(torch.stack((mean * count, count)))
        return mean_of((total, count))


def needs_closure(run: Run) -> bool:
    """Return whether the optimizer of a run needs a closure.

    Raises:
        UserError: it needs one, and the run has several optimizers, fp16, accumulation or FSDP2.
    """
    with_closure = [
        (name, optimizer)
        for name, optimizer in run.optimizers.items()
        if _requires_closure(optimizer, run.settings.closures.get(name))
    ]
    if not with_closure:
        return False
    name, optimizer = with_closure[0]
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


def _requires_closure(optimizer: optim.Optimizer, option: bool | None) -> bool:
    """Return `option` (`optimizer.closure`). If it is None, return whether `step` has a required argument `closure`."""
    if option is not None:
        return option
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty
