"""EMAHook: averages the weights while they are trained, and evaluates on the average.

An update is `average += share * (weights - average)`. Each `ema_type` has a formula, a function that returns the share
of the new weights, above 0 and at most 1. Its arguments:

* `updates`: the number of completed updates, at least 1. The first update is a copy and needs no formula.
* `steps`: optimizer steps since the first update, or epochs with `by_epoch`: `updates * interval`. MMEngine's name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.interval import Every
from hydraloop.errors import UserError, suggestion
from hydraloop.hooks.averaged_weights import AveragedTensors
from hydraloop.schemas.option_checks import check_above, check_at_least

if TYPE_CHECKING:
    from torch import Tensor

MOMENTUM = 0.0002
"""MMEngine's default; the average is over about 1 / 0.0002 = 5000 updates."""
WARM_UP_STEPS = 100
"""MMDetection's default."""
Formula = Callable[[int, int], float]
"""Computes the share of the new weights from `updates` and `steps`."""


def exponential(updates: int, steps: int, *, momentum: float = MOMENTUM, warmup: bool = True) -> float:
    """`momentum`; with `warmup` max(momentum, 9 / (10 + updates)).

    With `warmup`, the average of a short run does not consist of its initial weights. From MMEngine's
    ExponentialMovingAverage; the warm-up is that of TensorFlow's ExponentialMovingAverage with `num_updates`.
    """
    return max(momentum, 9.0 / (10.0 + updates)) if warmup else momentum


def stochastic(updates: int, steps: int) -> float:
    """1 / (1 + updates), the plain mean (Izmailov et al., 2018; MMEngine's StochasticWeightAverage)."""
    return 1.0 / (1.0 + updates)


def momentum_annealing(updates: int, steps: int, *, momentum: float = MOMENTUM, gamma: float = 100.0) -> float:
    """max(momentum, gamma / (gamma + steps)) (MMEngine's MomentumAnnealingEMA)."""
    return max(momentum, gamma / (gamma + steps))


def exp_momentum(updates: int, steps: int, *, momentum: float = MOMENTUM, gamma: float = 2000.0) -> float:
    """momentum + (1 - momentum) * exp(-(1 + steps) / gamma) (MMDetection's ExpMomentumEMA, from YOLOX)."""
    return momentum + (1.0 - momentum) * math.exp(-(1.0 + steps) / gamma)


def linear_momentum(
    updates: int, steps: int, *, momentum: float = MOMENTUM, warm_up_steps: int = WARM_UP_STEPS
) -> float:
    """min(momentum, (1 + steps) / (warm_up_steps + steps)) (MMDetection's LinearMomentumEMAHook).

    The share grows towards `momentum` only if that is above 1 / warm_up_steps. The default momentum is below it, so
    that the share is constant. There are two differences from MMDetection. Its bound is momentum ** interval, which
    would nearly stop the average here, where `momentum` is the share of the new weights. Its average begins with the
    weights before the first step, here it begins with those of the first update.
    """
    return min(momentum, (1.0 + steps) / (warm_up_steps + steps))


FORMULAS: dict[str, Callable[..., float]] = {
    formula.__name__: formula
    for formula in (exponential, stochastic, momentum_annealing, exp_momentum, linear_momentum)
}
"""By `ema_type`."""


def formula_of(ema_type: str, options: dict[str, Any]) -> Formula:
    """Return the formula of an `ema_type`.

    Args:
        ema_type: a key of `FORMULAS`.
        options: the options that differ from their default.

    Raises:
        UserError: there is no such type, it does not have one of the options, or an option is out of range.
    """
    if ema_type not in FORMULAS:
        raise UserError(
            f"there is no ema_type {ema_type!r}", key="ema_type", remedy=suggestion(str(ema_type), FORMULAS)
        )
    formula = FORMULAS[ema_type]
    for name in options.keys() - (formula.__kwdefaults__ or {}).keys():
        raise UserError(f"the ema_type {ema_type} has no {name}", key=name, remedy="Leave it out, or use another type.")
    check_above(0, gamma=options.get("gamma"))
    check_at_least(1, warm_up_steps=options.get("warm_up_steps"))
    if not 0.0 < options.get("momentum", MOMENTUM) < 1.0:
        raise UserError(
            f"{options['momentum']} is not between 0 and 1",
            key="momentum",
            remedy="It is the share of the new weights in each update: 0.0002, not 0.9998.",
        )
    return partial(formula, **options)


_DEFAULTS: dict[str, Any] = {"momentum": MOMENTUM, "warmup": True, "gamma": None, "warm_up_steps": WARM_UP_STEPS}
"""The defaults of the options that formulas have. Null stands for the default of the formula."""


class EMAHook(Hook):
    """Averages the weights over optimizer steps and evaluates on the average; training is unchanged.

    The first update copies the weights. Each further update moves the average towards them, by the formula of
    `ema_type` or by `weight`. Evaluations use the average from the first update on, unless `weights=raw`.

    Priority NORMAL, MMEngine's: before `checkpoint`, which saves the average of the same step. Cost: no host sync; an
    update is one foreach kernel over all parameters; memory for one more model, two during evaluation. State: the
    averages, the number of updates, and the first step of `begin_epoch`. Options: `EMAHookConf`.
    """

    collective = True  # all ranks gather the shards

    def __init__(
        self,
        *,
        ema_type: str = "exponential",
        momentum: float = MOMENTUM,
        warmup: bool = True,
        interval: int = 1,
        by_epoch: bool = False,
        begin_epoch: int = 0,
        begin_iter: int = 0,
        update_buffers: bool = False,
        gamma: float | None = None,
        warm_up_steps: int = WARM_UP_STEPS,
        weight: Callable[[Tensor, Tensor, int], Tensor | None] | None = None,
    ) -> None:
        """Check the options.

        Raises:
            UserError: an option is out of range or belongs to another `ema_type`, or two options contradict each other.
        """
        options = {"momentum": momentum, "warmup": warmup, "gamma": gamma, "warm_up_steps": warm_up_steps}
        changed = {name: value for name, value in options.items() if value != _DEFAULTS[name]}
        self._formula = formula_of(ema_type, changed)
        self._custom = weight
        if weight is not None and (changed or ema_type != "exponential"):
            also = next(iter(changed), "ema_type")
            raise UserError(f"replaces {also}, which is set, too", key="weight", remedy=f"Leave out {also} or weight.")
        check_at_least(1, interval=interval)
        check_at_least(0, begin_epoch=begin_epoch, begin_iter=begin_iter)
        if begin_iter and (begin_epoch or by_epoch):
            raise UserError(
                "begin_iter counts optimizer steps and cannot be combined with begin_epoch or by_epoch",
                key="begin_iter",
                remedy="Set only begin_epoch, or only begin_iter with by_epoch=false.",
            )
        self.updates = 0
        """Number of updates, including the first copy."""
        self._averages = AveragedTensors(buffers=update_buffers)
        self._strict = True
        self._interval = interval
        self._by_epoch = by_epoch
        self._begin_epoch = begin_epoch
        self._begin_iter = begin_iter
        self._begins_in_epoch = begin_epoch > 1 and not by_epoch
        """Whether the first update is at the first optimizer step of `begin_epoch`, which is not known before."""
        self._every: Every | None = None
        """The optimizer steps (epochs with `by_epoch`) of the updates; None before `begin_epoch`."""
        if not self._begins_in_epoch:
            self._every = Every(interval, begin_epoch if by_epoch else begin_iter)
        self.idle_points = ("after_train_iter",) if by_epoch else ("after_train_epoch",)

    # Before training. ----------------------------------------------------------------------------------------------

    def before_run(self, engine: Engine) -> None:
        """Collect the tensors to average, before a checkpoint is loaded, which may contain their averages."""
        self._averages.follow(engine.model)
        self._strict = engine.settings.resume_strict

    def before_train(self, engine: Engine) -> None:
        """Reject options with which there would be no average, as MMEngine does. A resumed run is not checked.

        Raises:
            UserError: training would end before the first update.
        """
        if engine.progress.iteration or not engine.max_iters:
            return
        last = engine.max_epochs
        unit = "epochs"
        updates = Every(1 if self._begins_in_epoch else self._interval, self._begin_epoch)
        if not (self._by_epoch or self._begin_epoch):
            steps_per_epoch = -(-engine.progress.epoch_length // engine.stepper.accumulate)
            last = engine.max_epochs * steps_per_epoch
            unit = "optimizer steps"
            updates = Every(self._interval, self._begin_iter)
        if not updates.times_until(last):
            option = "begin_epoch" if self._begin_epoch else "begin_iter" if self._begin_iter else "interval"
            raise UserError(
                f"training ends after {last} {unit}, before the first update of the average",
                key=f"{self.key}.{option}",
                remedy="Lower it, train for longer, or leave the hook out.",
            )

    # Updates. ------------------------------------------------------------------------------------------------------

    def before_train_epoch(self, engine: Engine) -> None:
        """Use the model's current tensors, which may have been replaced between epochs; begin at `begin_epoch`."""
        self._averages.rebind()
        if self._every is None and engine.progress.epoch + 1 >= self._begin_epoch:
            self._every = Every(self._interval, engine.progress.optimizer_step + 1)

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Update the average after an optimizer step. A step that fp16 has skipped is not an update."""
        if engine.stepper.stepped and self._every is not None and self._every.fires_at(engine.progress.optimizer_step):
            self._update()

    def after_train_epoch(self, engine: Engine) -> None:
        """Update the average at the end of an epoch, with `by_epoch`."""
        if self._every is not None and self._every.fires_at(engine.progress.epoch):
            self._update()

    def _update(self) -> None:
        if self.updates == 0:
            self._averages.start()
        elif self._custom is not None:
            self._averages.replace(self._custom, self.updates)
        else:
            self._averages.update(self._formula(self.updates, self.updates * self._interval))
        self.updates += 1

    # Evaluation. ---------------------------------------------------------------------------------------------------

    def before_val_epoch(self, engine: Engine) -> None:
        """Validate on the average."""
        engine.evaluator.during(self._swapped(engine))

    def before_test_epoch(self, engine: Engine) -> None:
        """Test on the average, except for the weights of a checkpoint file."""
        engine.evaluator.during(self._swapped(engine))

    @contextmanager
    def _swapped(self, engine: Engine) -> Iterator[None]:
        """Copy the average into the model's parameters, which keep their identity; then restore the raw weights."""
        if not self.updates or engine.evaluator.tested_checkpoint is not None or engine.settings.weights == "raw":
            yield
            return
        with self._averages.swapped_in():
            yield

    def average_of(self, tensor: Tensor) -> Tensor | None:
        """Return the average of a tensor of the model, to be changed in place; None before the first update.

        `sync_norm` and `sync_buffers` use it to average over the ranks.
        """
        return self._averages.average_of(tensor)

    # State. --------------------------------------------------------------------------------------------------------

    def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Add to the metadata that this hook's state contains averaged weights."""
        if self.updates:
            checkpoint["meta"]["averaged_weights"] = self.name

    def state_dict(self) -> dict[str, Any]:
        """Return the averages by the model's state-dict keys, the number of updates, and the first optimizer step of
        `begin_epoch` (None before it)."""
        begin = self._every.begin if self._begins_in_epoch and self._every is not None else None
        return {"averaged": self._averages.state_dict(), "updates": self.updates, "begin": begin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue with the averages of a checkpoint; the model already has its raw weights.

        Raises:
            UserError: an average is missing or unknown, unless `resume_strict=false`.
        """
        self.updates = state["updates"]
        if self._begins_in_epoch:
            self._every = None if state["begin"] is None else Every(self._interval, state["begin"])
        self._averages.load_state_dict(state["averaged"], strict=self._strict, key=self.key)
