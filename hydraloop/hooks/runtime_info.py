"""RuntimeInfoHook: provides the progress, metrics, losses, lr and momentum of the run to other hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Priority
from hydraloop.engine.messages import scalars_of
from hydraloop.engine.summary import group_names
from hydraloop.hooks.monitoring import check_metric


class RuntimeInfoHook(Hook):
    """Provides the state of the run in `engine.messages`.

    Facts are computed when they are read (MMEngine writes them every iteration). From before_run on: `epoch` and `iter`
    (completed), `max_epochs`, `max_iters`, `metrics` (of the last validation) and `losses` (of the last iteration, by
    name, tensors on their device). From before_train on: `lr` and `momentum` of the first parameter group (the first
    beta of Adam; None if the optimizer has none), and `lrs`, the lr of each further group: `{"lr/1": …}`. With several
    optimizers, the first group of each has the name of its optimizer (`lr/generator`).

    `losses` are the loss, the other scalars in the outputs, and what the task has logged; the records have their means.

    Priority VERY_HIGH, as in MMEngine: other hooks read the facts at the same mount point. No host sync, except for
    reading `lr` if the optimizer keeps it as a tensor. No state, no options.
    """

    priority = Priority.VERY_HIGH

    def __init__(self) -> None:
        self._losses: dict[str, float | Tensor] = {}
        self._logged: dict[str, float | Tensor] = {}  # the task's dict, which it fills in an iteration

    def before_run(self, engine: Engine) -> None:
        provide, progress = engine.messages.provide, engine.progress
        provide("epoch", lambda: progress.epoch)
        provide("iter", lambda: progress.iteration)
        provide("max_epochs", lambda: engine.max_epochs)
        provide("max_iters", lambda: engine.max_iters)
        provide("metrics", lambda: engine.metrics)
        provide("losses", lambda: self._losses)
        self._losses = {}

    def before_train(self, engine: Engine) -> None:
        """Provide the facts about the optimizer.

        Raises:
            UserError: no validation reports an objective of the search.
        """
        for name in engine.settings.objectives:
            check_metric(name, engine, key="sweep.objectives")
        self._logged = getattr(engine.task, "logged", {})
        self._logged.clear()
        optimizer = engine.optimizer
        engine.messages.provide("lr", lambda: float(optimizer.param_groups[0]["lr"]))
        engine.messages.provide("lrs", lambda: _further_lrs(engine))
        engine.messages.provide("momentum", lambda: _momentum(optimizer.param_groups[0]))

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Add the loss and the other scalars of this iteration; tensors stay on their device."""
        # The engine has checked and detached the loss.
        losses = {"loss": outputs["loss"], **dict(scalars_of(outputs)), **self._logged}
        self._logged.clear()
        for name, value in losses.items():
            engine.messages.add(name, value, engine.stepper.loss_weights.get(name, engine.stepper.local_samples))
        self._losses = losses


def _further_lrs(engine: Engine) -> dict[str, float]:
    """Return the lr of each group but the first, by its name in the record. Groups may be added during the run."""
    groups = engine.optimizer.param_groups
    names = group_names(engine.run.groups)
    names += map(str, range(len(names), len(groups)))
    return {f"lr/{name}": float(group["lr"]) for name, group in zip(names[1:], groups[1:], strict=True)}


def _momentum(group: Mapping[str, Any]) -> float | None:
    value = group.get("momentum")
    if value is None and isinstance(betas := group.get("betas"), list | tuple):
        value = betas[0]
    return None if value is None else float(value)
