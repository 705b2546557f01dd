"""Optimizers whose `step` calls a function that repeats forward and backward, such as LBFGS and SAM."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, optim

from hydraloop.engine.stepping.accumulation import Pair, mean_of, weighed
from hydraloop.errors import UserError

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


def closure_of(engine: Engine, optimizers: dict[str, optim.Optimizer]) -> Closure | None:
    """Return what takes the steps of the engine's optimizer, if it needs a closure.

    Raises:
        UserError: it needs one, and the run has several optimizers, fp16, accumulation or FSDP2.
    """
    wanted = engine.settings.closures
    needing = [name for name, one in optimizers.items() if _needs(one, wanted.get(name))]
    if not needing:
        return None
    problem = f"{type(optimizers[needing[0]]).__name__} evaluates the loss several times in a step"
    for refused, what, key, remedy in (
        (len(optimizers) > 1, "several optimizers", f"optimizer.{needing[0]}", "Use it as the only optimizer."),
        (engine.precision.name == "fp16", "fp16", "precision", "Use precision=bf16 or precision=fp32."),
        (engine.accumulate > 1, "accumulation", "engine.accumulate", "Use 1, and a larger data.loader.batch_size."),
        (engine.distributed.sharded, "FSDP2", "distributed.strategy", "Use distributed.strategy=ddp."),
    ):
        if refused:
            raise UserError(f"{problem}, which is not possible with {what}", key=key, remedy=remedy)
    return Closure(engine)


def _needs(optimizer: optim.Optimizer, wanted: bool | None) -> bool:
    if wanted is not None:
        return wanted
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


class Closure:
    """Takes steps with a function that repeats forward and backward.

    LBFGS calls it first for the loss and the gradients of the iteration, which the engine has already. SAM may call it
    only after it has moved the weights. So the weights at the first call are compared in each step, until they have
    moved once. A SAM may begin with a distance of 0.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._moves_first = False
        """Whether the optimizer has moved the weights or changed the gradients before its first call."""

    def step(self, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> bool:
        """Take a step. Values in the records stay those of the iteration's own forward.

        One host sync of its own, unless the optimizer has moved the weights before the first call in an earlier step.

        Args:
            outputs: of the iteration, whose gradients are computed and clipped.
        """
        task, optimizer = self._engine.task, self._engine.optimizer
        logged = dict(task.logged)
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        before = None if self._moves_first else _copies(parameters, gradients)
        mean = self._over_ranks(outputs["loss"], self._engine.loss_weights["loss"])
        called = False

        @torch.enable_grad()  # `step` runs without gradients
        def closure() -> Any:  # torch's types say that it returns a float
            nonlocal called
            is_first, called = not called, True
            if is_first and before is not None:
                self._moves_first = not all(map(torch.equal, before, _copies(parameters, gradients)))
            if not is_first or self._moves_first:
                return self._evaluate(optimizer, batch_idx, batch)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient  # the optimizer may have removed it
            return mean

        optimizer.step(closure)
        task.logged.clear()
        task.logged.update(logged)  # hooks hold the dict
        return True

    def _evaluate(self, optimizer: optim.Optimizer, batch_idx: int, batch: Any) -> Tensor:
        """Compute the gradients, clipped by the hooks, and return the mean loss over the samples of all ranks."""
        engine, window = self._engine, self._engine._window
        optimizer.zero_grad()
        samples = engine.task.num_samples(batch)
        if window is not None:
            window.begin(batch_idx, samples, 1)
        outputs: dict[str, Any] = engine.forward(batch)
        loss: Tensor | Pair = outputs["loss"]
        mean, weight = weighed(loss, engine.batch_samples)
        if window is None:
            engine.precision.backward(mean)
        else:
            engine.precision.backward(window.weigh(loss), window.tally_gradient())
            window.correct(optimizer)
        outputs["loss"] = mean.detach()
        for call in engine.stages.before_optimizer_step:
            call(engine, batch_idx, batch, outputs)
        return self._over_ranks(outputs["loss"], weight)

    def _over_ranks(self, mean: Tensor, weight: float | Tensor) -> Tensor:
        """Return the mean loss of all ranks, the same on each: the optimizer's number of calls may depend on it."""
        ranks = self._engine.distributed
        if ranks.world_size == 1:
            return mean
        if not self._engine.batch_samples:  # the loss of a filler batch may be NaN
            mean = torch.zeros_like(mean)
        mean = mean.reshape(())
        count = torch.as_tensor(weight, dtype=mean.dtype, device=mean.device).reshape(())
        total, count = ranks.sum(torch.stack((mean * count, count)))
        return mean_of((total, count))


def _copies(parameters: list[Tensor], gradients: list[Tensor | None]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in (*parameters, *gradients) if tensor is not None]
