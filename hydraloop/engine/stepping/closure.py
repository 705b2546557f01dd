"""Optimizers whose `step` calls a function that repeats forward and backward, such as LBFGS and SAM."""

from __future__ import annotations

import inspect
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, optim

from hydraloop.engine.stepping.accumulation import Pair, mean_of
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
    """Takes steps with a function that repeats forward and backward."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def step(self, optimizer: optim.Optimizer, batch_idx: int, batch: Any) -> bool:
        """Take a step. The gradients are those of the first evaluation, whose values stay in the records."""
        task = self._engine.task
        logged = dict(task.logged)
        closure: Any = partial(self._evaluate, optimizer, batch_idx, batch)  # torch's types say that it returns a float
        optimizer.step(closure)
        task.logged.clear()
        task.logged.update(logged)  # hooks hold the dict
        return True

    @torch.enable_grad()  # `step` runs without gradients
    def _evaluate(self, optimizer: optim.Optimizer, batch_idx: int, batch: Any) -> Tensor:
        """Compute the gradients, clipped by the hooks, and return the mean loss over the samples of all ranks."""
        engine, window = self._engine, self._engine._window
        optimizer.zero_grad()
        if window is not None:
            window.begin(batch_idx, engine.task.num_samples(batch), 1)
        outputs: dict[str, Any] = engine.forward(batch)
        loss: Tensor | Pair = outputs["loss"]
        mean = loss if isinstance(loss, Tensor) else mean_of(loss)
        if window is None:
            engine.precision.backward(mean)
        else:
            engine.precision.backward(window.weigh(loss), window.tally_gradient())
            window.correct(optimizer)
            mean = self._over_ranks(loss, window.mine)
        outputs["loss"] = mean.detach()
        for call in engine.stages.before_optimizer_step:
            call(engine, batch_idx, batch, outputs)
        return mean.detach()

    def _over_ranks(self, loss: Tensor | Pair, mine: int) -> Tensor:
        """Return the mean loss of all ranks, the same on each: the optimizer's number of calls may depend on it."""
        total, count = (loss * mine, mine) if isinstance(loss, Tensor) else loss
        pair = torch.stack((total.detach(), torch.as_tensor(count, dtype=total.dtype, device=total.device)))
        total, count = self._engine.distributed.sum(pair * (mine > 0))  # a filler batch counts as 0
        return mean_of((total, count))
