"""Optimizers whose `step` calls a function that repeats forward and backward, such as LBFGS and SAM."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, optim

from hydraloop.engine.run import Run
from hydraloop.errors import UserError


def closure_of(run: Run) -> Closure | None:
    """Return what takes the steps of the optimizer, if it needs a closure.

    Raises:
        UserError: it needs one, and the run has several optimizers, fp16, accumulation or FSDP2.
    """
    optimizers, wanted = run.optimizers, run.settings.closures
    needing = [name for name, one in optimizers.items() if _needs(one, wanted.get(name))]
    if not needing:
        return None
    problem = f"{type(optimizers[needing[0]]).__name__} evaluates the loss several times in a step"
    for refused, what, key, remedy in (
        (len(optimizers) > 1, "several optimizers", f"optimizer.{needing[0]}", "Use it as the only optimizer."),
        (run.precision.name == "fp16", "fp16", "precision", "Use precision=bf16 or precision=fp32."),
        (
            run.settings.accumulate > 1,
            "accumulation",
            "engine.accumulate",
            "Use 1, and a larger data.loader.batch_size.",
        ),
        (run.ranks.sharded, "FSDP2", "distributed.strategy", "Use distributed.strategy=ddp."),
    ):
        if refused:
            raise UserError(f"{problem}, which is not possible with {what}", key=key, remedy=remedy)
    return Closure(run.optimizer)


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

    def __init__(self, optimizer: optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._moves_first = False
        """Whether the optimizer has moved the weights or changed the gradients before its first call."""

    def step(self, loss: Tensor, again: Callable[[], Tensor]) -> None:
        """Take a step.

        One host sync of its own, unless the optimizer has moved the weights before the first call in an earlier step.

        Args:
            loss: of the iteration, whose gradients are computed.
            again: computes the gradients at the current weights, and returns the loss.
        """
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in parameters]
        before = None if self._moves_first else _copies(parameters, gradients)
        called = False

        @torch.enable_grad()  # `step` runs without gradients
        def closure() -> Any:  # torch's types say that it returns a float
            nonlocal called
            is_first, called = not called, True
            if is_first and before is not None:
                self._moves_first = not all(map(torch.equal, before, _copies(parameters, gradients)))
            if not is_first or self._moves_first:
                return again()
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.grad = gradient  # the optimizer may have removed it
            return loss

        self._optimizer.step(closure)


def _copies(parameters: list[Tensor], gradients: list[Tensor | None]) -> list[Tensor]:
    return [tensor.detach().clone() for tensor in (*parameters, *gradients) if tensor is not None]
