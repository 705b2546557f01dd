"""RuntimeInfoHook: provides the progress, metrics, losses, lr and momentum of the run to other hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Priority
from hydraloop.engine.records.messages import scalars_of
from hydraloop.engine.report.summary import group_names
from hydraloop.hooks.shared.monitoring import direction, is_better


class BestSeen(NamedTuple):
    """The best validation of the run until now; without `save_best`, of this process."""

    metric: str
    value: float
    epoch: int
    """Epochs completed at that validation."""
    iteration: int
    """Iterations completed at that validation."""


class RuntimeInfoHook(Hook):
    """Provides the state of the run in `engine.messages`.

    Facts are computed when they are read (MMEngine writes them every iteration). From before_run on: `epoch` and `iter`
    (completed), `max_epochs`, `max_iters`, `metrics` (of the last validation), `monitor`, `best` and `losses` (of the
    last iteration, by name, tensors on their device). From before_train on: `lr` and `momentum` of the first parameter
    group (the first beta of Adam; None if the optimizer has none), and `lrs`, the lr of each further group whose lr
    differs or has differed: `{"lr/1": …}`. With several optimizers, it has the lr of each further optimizer
    (`lr/generator`), and `lr/generator.1` for a group with another lr.

    `monitor` is `(metric, whether high values are good)` of the first metric in the checkpoint hook's `save_best`,
    otherwise of the task's first metric; None if it is not known which values are good. `best` is a `BestSeen` of that
    metric, None before the first validation. `losses` are the loss, the other scalars in the
    outputs, and what the task has logged; the records have their means.

    Priority VERY_HIGH, as in MMEngine: other hooks read the facts at the same mount point. No host sync, except for
    reading `lr` if the optimizer keeps it as a tensor. No state, no options.
    """

    priority = Priority.VERY_HIGH

    def __init__(self) -> None:
        self._improvements: list[BestSeen] = []  # the last one is the best validation
        self._losses: dict[str, float | Tensor] = {}
        self._logged: dict[str, float | Tensor] = {}  # the task's dict, which it fills in an iteration

    def before_run(self, engine: Engine) -> None:
        provide, progress = engine.messages.provide, engine.progress
        provide("epoch", lambda: progress.epoch)
        provide("iter", lambda: progress.iteration)
        provide("max_epochs", lambda: engine.max_epochs)
        provide("max_iters", lambda: engine.max_iters)
        provide("metrics", lambda: engine.metrics)
        provide("best", self._best)
        provide("losses", lambda: self._losses)
        self._improvements, self._losses = [], {}
        monitor = _first_metric(engine)
        provide("monitor", lambda: monitor)

    def before_train(self, engine: Engine) -> None:
        """Provide the facts about the optimizer; restore the best validation of a resumed run."""
        self._logged = getattr(engine.task, "logged", {})
        self._logged.clear()
        known, optimizer = engine.best, engine.optimizer
        if known is not None:
            epoch = known.iteration // max(engine.progress.epoch_length, 1)
            self._improvements = [BestSeen(known.metric, known.value, epoch, known.iteration)]
        engine.messages.provide("lr", lambda: float(optimizer.param_groups[0]["lr"]))
        engine.messages.provide("lrs", _FurtherLrs(engine).read)
        engine.messages.provide("momentum", lambda: _momentum(optimizer.param_groups[0]))

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """Keep the best value of the monitored metric."""
        monitor: tuple[str, bool] | None = engine.messages.read("monitor")
        if monitor is None or monitor[0] not in metrics:
            return
        name, higher = monitor
        best = self._best()
        if is_better(engine.evaluator.comparable[name], None if best is None else best.value, higher=higher):
            seen = BestSeen(name, metrics[name], engine.progress.epoch, engine.progress.iteration)
            self._improvements.append(seen)

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Add the loss and the other scalars of this iteration; tensors stay on their device."""
        # The engine has checked and detached the loss.
        losses = {"loss": outputs["loss"], **dict(scalars_of(outputs)), **self._logged}
        self._logged.clear()
        for name, value in losses.items():
            engine.messages.add(name, value, engine.stepper.loss_weights.get(name, engine.stepper.batch_samples))
        self._losses = losses

    def _best(self) -> BestSeen | None:
        return self._improvements[-1] if self._improvements else None


class _FurtherLrs:
    """One learning rate per distinct value: a group is listed when its rate differs from those of the groups before it.

    A group that was listed once stays listed.
    """

    def __init__(self, engine: Engine) -> None:
        self._optimizer, groups = engine.optimizer, engine.run.groups
        self._names = group_names(groups)
        # The first group of each optimizer is listed even with the same lr, because its schedule may be another.
        self._listed = {
            index for index, name in enumerate(self._names) if index == 0 or name == groups[index].optimizer
        }
        self._rates("initial_lr")

    def read(self) -> dict[str, float]:
        """Return the lrs by their names in the record, without that of the first group."""
        lrs = self._rates("lr")
        return {f"lr/{name}": lrs[index] for index, name in enumerate(self._names) if index and index in self._listed}

    def _rates(self, key: str) -> list[float]:
        """Return the value of each group, and list the groups whose value differs from those before them."""
        groups = self._optimizer.param_groups
        self._names += map(str, range(len(self._names), len(groups)))  # added during the run
        lrs = [float(group.get(key, group.get("lr", 0.0))) for group in groups]
        for index, lr in enumerate(lrs):
            if groups[index]["params"] and lr not in [lrs[other] for other in self._listed if other < index]:
                self._listed.add(index)
        return lrs


def _momentum(group: Mapping[str, Any]) -> float | None:
    value = group.get("momentum")
    if value is None and isinstance(betas := group.get("betas"), list | tuple):
        value = betas[0]
    return None if value is None else float(value)


def _first_metric(engine: Engine) -> tuple[str, bool] | None:
    """Return the first metric and whether high values are good; None if there is no metric or this is not known."""
    name = next(iter(engine.evaluator.metric_names), None)
    higher = None if name is None else direction(name, engine)
    return None if name is None or higher is None else (name, higher)
