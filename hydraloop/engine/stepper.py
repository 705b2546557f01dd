"""Stepper: forward, backward and the optimizer step. No other file does them in training."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor, optim

from hydraloop.engine.batches import Batches, Window
from hydraloop.engine.closure import Closure, closure_of
from hydraloop.engine.loaders import has_exact_sizes, share_of
from hydraloop.engine.loss_check import LossCheck
from hydraloop.engine.loss_weighting import (
    LossWeighting,
    SumAndCount,
    check_loss,
    empty_batch_error,
    mean_and_weight,
    mean_of,
    no_loss_error,
)
from hydraloop.engine.run import Run

Outputs = dict[str, Any]


class Stepper:
    """Trains a task on its batches: forward, backward and the optimizer step.

    Args:
        run: the parts of the run.
        batches: of training.
        loss_check: gets the losses.
    """

    wraps: ClassVar[bool] = True
    """Whether DDP wraps the task to average its gradients."""

    def __init__(self, run: Run, batches: Batches, loss_check: LossCheck) -> None:
        self._task, self._ranks, self._precision = run.task, run.ranks, run.precision
        self._calls, self._loss_check = run.calls, loss_check
        self.accumulate = run.settings.accumulate
        """Iterations in an optimizer step."""
        self._is_wrapped = self.wraps and run.trained_by is not None
        if not (self._is_wrapped or self._ranks.sharded):
            self._ranks.start_equal(self._task)
        self._forward = self._precision.forward(self._ranks.wrap(self._task) if self._is_wrapped else self._task)
        self._weighting: LossWeighting | None = None
        if self.accumulate > 1 or self._ranks.world_size > 1:
            self._weighting = LossWeighting(self.accumulate, self._ranks, run.device)
        self._closure: Closure | None = None if run.trained_by is None else closure_of(run)
        self._all = cast("optim.Optimizer", run.trained_by)  # None if the engine only evaluates, and never steps
        self.optimizer = self._all
        """The optimizer whose gradients are computed; outside of the steps of a task, all of them as one."""
        self._hooks_may_change_batches = any(
            hook.overrides("before_train_iter") or hook.overrides("before_iter") for hook in run.hooks.values()
        )
        self._batches = batches
        self._has_iterated = False
        self.step = ""
        """The name of the task's step that is being done; empty outside of steps."""
        self.stepped = False
        """Whether an optimizer stepped in the iteration just completed."""
        self._skips = False
        self.window_closed = True
        """Whether the accumulation window is closed, so that there are no gradients before an optimizer step."""
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
            self._weighting.samples_at = share_of(self._batches.loaders.train)
            exact = has_exact_sizes(self._batches.loaders.train) and not self._hooks_may_change_batches
            exact = exact and not getattr(self._task, "counts_its_own_samples", True)
            self._weighting.sizes_are_exact = all(self._ranks.gather(exact))
        if self._all is not None:
            self._all.zero_grad(set_to_none=True)
        self.optimizer, self.step, self.window_closed = self._all, "", True

    def skip_step(self) -> None:
        """Skip the optimizer step of this window; called in before_optimizer_step, on every rank.

        The step then does not count for schedules and averages of weights, and its losses not for `loss_check`.

        Raises:
            RuntimeError: the optimizer repeats the forward and backward pass in its step (LBFGS).
        """
        if self.repeats:
            raise RuntimeError("the step of an optimizer with a closure cannot be skipped")
        self._skips = True

    @property
    def repeats(self) -> bool:
        """Whether the optimizer repeats the forward and backward pass in its step (LBFGS)."""
        return self._closure is not None

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
            self._forward = self._precision.forward(self._ranks.wrap(self._task, again=True))

    def iterate(self, window: Window, batch_idx: int, batch: Any) -> Outputs:
        """Do an iteration: forward and backward, and with the last batch of the window the optimizer step.

        No host sync of its own.

        Returns:
            What the task returned, with `loss` detached.
        """
        weighting, calls, optimizer, closes = self._weighting, self._calls, self.optimizer, batch_idx == window[-1]
        if weighting is not None and batch_idx == window[0]:
            weighting.begin_window(window)
        outputs = self._forward_backward(batch_idx, batch, closes=closes)
        loss = outputs["loss"]  # held to the end: an iteration takes 10 µs longer if its graph is freed before the step
        outputs["loss"] = loss.detach()
        self._loss_check.keep(batch_idx, self.step, outputs["loss"] if self.batch_samples else None)
        calls.after_backward(batch_idx, batch, outputs)
        self.stepped = self._skips = False
        if closes:
            self._precision.unscale(optimizer)
            if weighting is not None:
                weighting.correct(optimizer)
            calls.before_optimizer_step(batch_idx, batch, outputs)
            if self._skips:
                self._precision.skipped += 1
            elif self._closure is None:
                self.stepped = self._precision.step(optimizer)
            else:
                self.stepped = self._step_with_closure(self._closure, batch_idx, batch, outputs)
            for group in optimizer.param_groups:  # Optimizer.zero_grad without its 5 µs of profiler and checks
                for parameter in group["params"]:
                    parameter.grad = None
            self._loss_check.close_window(stepped=self.stepped)
        self.window_closed = closes
        if not self._has_iterated:
            self._has_iterated = True
            self._ranks.first_step_done()
        return outputs

    def _forward_backward(self, batch_idx: int, batch: Any, *, closes: bool) -> Outputs:
        """Add the gradients of a batch to those of its window. `closes`: it is the last one of the window."""
        weighting, step = self._weighting, self.step
        self.batch_samples = self.samples_of_all = samples = self._task.num_samples(batch)
        if not samples:
            raise empty_batch_error(batch_idx)
        if weighting is not None:
            weighting.begin_batch(batch_idx, samples)
            self.batch_samples, self.samples_of_all = weighting.samples, weighting.samples_of_all
            self._ranks.sync_gradients(closes)
        outputs: Outputs = self._forward(batch, step=step) if step else self._forward(batch)
        try:
            loss: Tensor | SumAndCount = outputs["loss"]
        except (KeyError, TypeError, IndexError):
            raise no_loss_error(self._task, outputs, step) from None
        check_loss(self._task, loss, step)
        samples = self.batch_samples
        mean, weight = (loss, samples) if isinstance(loss, Tensor) else mean_and_weight(loss, samples)
        self.loss_weights[f"{step}/loss" if step else "loss"] = weight
        if weighting is None:
            self._precision.backward(mean)
        else:
            weighted = weighting.weigh(loss, step)
            if closes:
                weighting.close_window()
            self._precision.backward(weighted)
        outputs["loss"] = mean
        return outputs

    def _step_with_closure(self, closure: Closure, batch_idx: int, batch: Any, outputs: Outputs) -> bool:
        """Take a step of an optimizer that computes losses and gradients itself. It always takes the step."""
        optimizer, logged, weight = self.optimizer, dict(self._task.logged), self.loss_weights["loss"]

        def again() -> Tensor:
            optimizer.zero_grad()
            if self._weighting is not None:
                self._weighting.begin_window((batch_idx,))
            repeated = self._forward_backward(batch_idx, batch, closes=True)
            repeated["loss"] = repeated["loss"].detach()
            if self._weighting is not None:
                self._weighting.correct(optimizer)
            self._calls.before_optimizer_step(batch_idx, batch, repeated)
            return self._mean_over_ranks(repeated["loss"])

        closure.step(self._mean_over_ranks(outputs["loss"]), again)
        # Records have the values of the iteration's own forward. Hooks hold the dict.
        self._task.logged.clear()
        self._task.logged.update(logged)
        self.loss_weights["loss"] = weight
        return True

    def _mean_over_ranks(self, mean: Tensor) -> Tensor:
        """Return the mean loss of all ranks, the same on each: the optimizer's number of calls may depend on it."""
        if self._ranks.world_size == 1:
            return mean
        mean = mean.reshape(()) if self.batch_samples else torch.zeros_like(mean).reshape(())  # a filler's may be NaN
        count = torch.as_tensor(self.loss_weights["loss"], dtype=mean.dtype, device=mean.device).reshape(())
        total, count = self._ranks.sum(torch.stack((mean * count, count)))
        return mean_of((total, count))
