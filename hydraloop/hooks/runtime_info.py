"""RuntimeInfoHook: where the run stands, for everybody who asks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from hydraloop.engine.hook import Hook, Priority
from hydraloop.errors import UserError
from hydraloop.hooks.shared.monitoring import higher_is_better, is_better

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


class BestSeen(NamedTuple):
    """The best validation of this process so far."""

    metric: str
    value: float
    epoch: int
    """Completed epochs then."""
    iteration: int
    """Completed iterations then."""


class RuntimeInfoHook(Hook):
    """Puts where the run stands into `engine.messages`.

    Facts, read when somebody asks (MMEngine writes them every iteration): `epoch` and `iter` (completed ones),
    `max_epochs`, `max_iters`, `metrics` (of the last validation), `best` (a `BestSeen` of the first metric;
    None where nothing says which values of it are good) and `losses` (of the iteration just done, by name, tensors left
    on their device) from before_run on; `lr` and `momentum` (of the first parameter group; the first beta of Adam; None
    where the optimizer has none) from before_train on. Scalars, added every iteration: the same losses, which are each
    scalar in the outputs whose name contains "loss".

    Mount points: before_run, before_train, after_train_iter, after_val_epoch. Priority VERY_HIGH, MMEngine's: others
    read it at the same mount point. No host sync (reading `lr` is one where the optimizer keeps it as a tensor). No
    state, no options.
    """

    priority = Priority.VERY_HIGH

    def __init__(self) -> None:
        self._best: BestSeen | None = None
        self._higher: bool | None = None
        self._losses: dict[str, float | Tensor] = {}

    def before_run(self, engine: Engine) -> None:
        """Provide the facts about progress and metrics."""
        provide, progress = engine.messages.provide, engine.progress
        provide("epoch", lambda: progress.epoch)
        provide("iter", lambda: progress.iteration)
        provide("max_epochs", lambda: engine.max_epochs)
        provide("max_iters", lambda: engine.max_iters)
        provide("metrics", lambda: engine.metrics)
        provide("best", lambda: self._best)
        provide("losses", lambda: self._losses)
        self._best, self._losses = None, {}
        self._higher = _direction(engine)

    def before_train(self, engine: Engine) -> None:
        """Provide the facts about the optimizer, which only training needs."""
        optimizer = engine.optimizer
        engine.messages.provide("lr", lambda: float(optimizer.param_groups[0]["lr"]))
        engine.messages.provide("momentum", lambda: _momentum(optimizer.param_groups[0]))

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """Remember the best value of the first metric so far."""
        if self._higher is None:
            return
        name = engine.metric_names[0]
        than = None if self._best is None else self._best.value
        if is_better(metrics[name], than, higher=self._higher):
            self._best = BestSeen(name, metrics[name], engine.progress.epoch, engine.progress.iteration)

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Add the losses of this iteration; they stay on the device."""
        add, losses = engine.messages.add, {}
        for name, value in outputs.items():
            if name == "loss":  # A detached scalar: the engine has seen to it.
                losses[name] = value
                add(name, value)
            elif "loss" in name:
                if isinstance(value, Tensor):
                    if value.numel() != 1:  # A loss per sample: an output, not a scalar.
                        continue
                    if value.requires_grad:  # Kept with its graph it would keep every activation alive.
                        value = value.detach()
                    if value.ndim:
                        value = value.reshape(())
                elif not isinstance(value, int | float):
                    continue
                losses[name] = value
                add(name, value)
        self._losses = losses


def _momentum(group: Mapping[str, Any]) -> float | None:
    value = group.get("momentum")
    if value is None and "betas" in group:
        value = group["betas"][0]
    return None if value is None else float(value)


def _direction(engine: Engine) -> bool | None:
    """Whether high values of the first metric are good; None where nothing says it."""
    try:
        return higher_is_better(engine.metric_names[0], engine, key="runtime_info")
    except (UserError, IndexError):
        return None
