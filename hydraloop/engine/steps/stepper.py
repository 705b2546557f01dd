"""Stepper: forward, backward and the optimizer step. No other file does them in training."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, optim

from hydraloop.engine.batches import Window
from hydraloop.engine.call_table import CallTable
from hydraloop.engine.loaders import Loader, share_of
from hydraloop.engine.progress import Progress
from hydraloop.engine.run import Run
from hydraloop.engine.steps.closure import Closure, closure_of
from hydraloop.engine.steps.loss_errors import no_gradient_error, no_loss_error
from hydraloop.engine.steps.loss_weighting import LossWeighting, SumAndCount, mean_and_weight, mean_of
from hydraloop.engine.steps.task_steps import TaskSteps, steps_of, without_gradients

Outputs = dict[str, Any]


class Stepper:
    """Trains a task on its batches: forward, backward and the optimizer step.

    Args:
        run: the parts of the run.
        loader: the train loader.
        progress: of the run.
        calls: after_backward and before_optimizer_step are called.
    """

    def __init__(self, run: Run, loader: Loader | None, progress: Progress, calls: CallTable) -> None:
        self._task, self._ranks, self._precision = run.task, run.ranks, run.precision
        self._progress, self._calls = progress, calls
        self.accumulate = run.settings.accumulate
        """Iterations in an optimizer step."""
        self._steps: TaskSteps | None = steps_of(run)
        if self._steps is not None:
            self._ranks.start_equal(self._task)
        wrapped = self._task if self._steps else self._ranks.wrap(self._task)
        self._forward = self._precision.forward(wrapped)
        self._weighting: LossWeighting | None = None
        if self.accumulate > 1 or self._ranks.world_size > 1:
            self._weighting = LossWeighting(self.accumulate, self._ranks, run.device, share_of(loader))
        self._closure: Closure | None = None if run.trained_by is None else closure_of(run)
        self._optimizer = self._current_optimizer = run.trained_by
        self._has_iterated = False
        self.step = ""
        """The name of the task's step that is being done; empty outside of steps."""
        self.stepped = False
        """Whether an optimizer stepped in the iteration just completed."""
        self.window_closed = True
        """Whether the accumulation window is closed, so that there are no gradients before an optimizer step."""
        self.batch_samples = 0
        """This rank's samples in the current batch; 0 for a filler batch, which only other ranks count."""
        self.loss_weights: dict[str, float | Tensor] = {}
        """By name in the outputs (`loss`, `<step>/loss`), the weight of this rank's loss in a mean over iterations and
        ranks: the samples of the batch, or the number of losses that the task returned with their sum; 0 for a
        filler."""

    def start(self) -> None:
        """Begin to train: forget the gradients and the open window of an earlier use."""
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
        self._current_optimizer, self.step, self.window_closed = self._optimizer, "", True

    @property
    def optimizer(self) -> optim.Optimizer:
        """The optimizer whose gradients are computed; outside of the steps of a task, all of them as one."""
        assert self._current_optimizer is not None, "Outcome.locked refuses to train without one"
        return self._current_optimizer

    def rewrap(self) -> None:
        """Wrap the task again after `requires_grad` of parameters has changed, on every rank.

        DDP averages only the gradients of parameters that required them when it wrapped the task. A task with steps
        is not wrapped.

        Raises:
            RuntimeError: called inside an accumulation window, whose gradients would be lost.
        """
        if not self.window_closed:
            raise RuntimeError("call rewrap between two accumulation windows")
        if self._steps is None:
            self._forward = self._task  # so that `wrap` can free the old wrapper
            self._forward = self._precision.forward(self._ranks.wrap(self._task, again=True))

    def iterate(self, window: Window, batch_idx: int, batch: Any) -> Outputs:
        """Do an iteration: forward and backward, and with the last batch of the window the optimizer step.

        No host sync of its own.

        Returns:
            What the task returned, with `loss` detached. With steps of the task, `<step>/<name>` of each step, and as
            `loss` the sum of the losses.
        """
        if self._steps is not None:
            outputs = self._do_steps(self._steps, batch_idx, batch)
        else:
            if batch_idx == window.first:
                self._begin_window(window.indices)
            self.window_closed = batch_idx == window.last
            outputs = self._forward_backward(batch_idx, batch)
            self._calls.after_backward(batch_idx, batch, outputs)
            self.stepped = self.window_closed and self._step(batch_idx, batch, outputs)
        samples = self.batch_samples if self._weighting is None else self._weighting.samples_of_all
        self._progress.complete_iteration(batch_idx, samples, stepped=self.stepped)
        if not self._has_iterated:
            self._has_iterated = True
            self._ranks.first_step_done()
        return outputs

    def _do_steps(self, steps: TaskSteps, batch_idx: int, batch: Any) -> Outputs:
        """Do the steps of the task that run in this iteration: for each, forward, backward and the optimizer step."""
        outputs: Outputs = {}
        total: Any = 0.0
        self.stepped, self.batch_samples = False, self._task.num_samples(batch)
        for step in steps.due(self._progress.iteration + 1):
            self.step, self._current_optimizer = step.name, step.optimizer
            self._begin_window((batch_idx,))
            # The forward pass must not see that the others require gradients, or its backward would compute them.
            with without_gradients(step.others):
                of_step = self._forward_backward(batch_idx, batch)
            if self._weighting is not None:
                self._ranks.average(step.trained, step.name)
            self._calls.after_backward(batch_idx, batch, of_step)
            self.stepped |= self._step(batch_idx, batch, of_step)
            outputs.update((f"{step.name}/{name}", value) for name, value in of_step.items())
            total = total + of_step["loss"]
        self.step, self._current_optimizer = "", self._optimizer
        outputs["loss"], self.loss_weights["loss"] = total, self.batch_samples
        return outputs

    def _begin_window(self, indices: Sequence[int]) -> None:
        if self._weighting is not None:
            self._weighting.begin_window(indices)

    def _forward_backward(self, batch_idx: int, batch: Any) -> Outputs:
        """Add the gradients of a batch to those of its window."""
        weighting, step = self._weighting, self.step
        self.batch_samples = self._task.num_samples(batch)
        if weighting is not None:
            weighting.begin_batch(batch_idx, self.batch_samples)
            self.batch_samples = weighting.samples
            self._ranks.sync_gradients(self.window_closed)
        outputs: Outputs = self._forward(batch, step=step) if step else self._forward(batch)
        loss = _loss_in(outputs, self._task, step)
        mean, self.loss_weights[f"{step}/loss" if step else "loss"] = mean_and_weight(loss, self.batch_samples)
        if step and not mean.requires_grad:
            raise no_gradient_error(step)
        if weighting is None:
            self._precision.backward(mean)
        else:
            weighted = weighting.weigh(loss)
            self._precision.backward(weighted, weighting.tally_gradient() if self.window_closed else None)
        outputs["loss"] = mean.detach()
        return outputs

    def _step(self, batch_idx: int, batch: Any, outputs: Outputs) -> bool:
        """Close the window: unscale, weight, clip (a hook), step. Return whether the step was taken."""
        optimizer = self._finish_gradients(batch_idx, batch, outputs)
        taken = self._step_with_closure(batch_idx, batch, outputs) if self._closure else self._precision.step(optimizer)
        for group in optimizer.param_groups:  # Optimizer.zero_grad without its 5 µs of profiler and checks
            for parameter in group["params"]:
                parameter.grad = None
        return taken

    def _finish_gradients(self, batch_idx: int, batch: Any, outputs: Outputs) -> optim.Optimizer:
        """Bring the gradients to the form in which the optimizer, which is returned, uses them."""
        optimizer = self.optimizer
        self._precision.unscale(optimizer)
        if self._weighting is not None:
            self._weighting.correct(optimizer)
        self._calls.before_optimizer_step(batch_idx, batch, outputs)
        return optimizer

    def _step_with_closure(self, batch_idx: int, batch: Any, outputs: Outputs) -> bool:
        """Take a step of an optimizer that computes losses and gradients itself. It always takes the step."""
        assert self._closure is not None
        optimizer, logged, weight = self.optimizer, dict(self._task.logged), self.loss_weights["loss"]

        def again() -> Tensor:
            optimizer.zero_grad()
            self._begin_window((batch_idx,))
            repeated = self._forward_backward(batch_idx, batch)
            self._finish_gradients(batch_idx, batch, repeated)
            return self._mean_over_ranks(repeated["loss"])

        self._closure.step(self._mean_over_ranks(outputs["loss"]), again)
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


def _loss_in(outputs: Any, task: Any, step: str) -> Tensor | SumAndCount:
    try:
        loss: Tensor | SumAndCount = outputs["loss"]
    except (KeyError, TypeError, IndexError):
        raise no_loss_error(task, outputs, step) from None
    return loss
