"""The formulas of `ema_type`: one class each, with its options, its source and its checks.

A formula returns the share of the new weights in an update: `average += share * (weights - average)`. The first update
is a copy and needs no formula, so that `updates`, the number of updates done, is at least 1. `steps` is the number of
optimizer steps since the first update (with `by_epoch`: of epochs): `updates * interval`. MMEngine has the same name
for it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any, Protocol

from hydraloop.errors import UserError, any_of, suggestion
from hydraloop.hooks.shared.option_checks import check_above_zero, check_at_least

MOMENTUM = 0.0002
"""MMEngine's default; the average is over about 1 / 0.0002 = 5000 updates."""
WARM_UP_STEPS = 100
"""MMDetection's default."""


class Formula(Protocol):
    """Computes the share of the new weights in an update."""

    def share(self, updates: int, steps: int) -> float:
        """Return the share of the new weights, above 0 and at most 1. `updates` and `steps` are at least 1."""


@dataclass(frozen=True, kw_only=True)
class ExponentialAverage:
    """`exponential`: `momentum`; with `warmup` max(momentum, 9 / (10 + updates)).

    With `warmup`, the average of a short run does not consist of its initial weights. From MMEngine's
    ExponentialMovingAverage; the warm-up is that of TensorFlow's ExponentialMovingAverage with `num_updates`.
    """

    momentum: float = MOMENTUM
    warmup: bool = True

    def __post_init__(self) -> None:
        _check_momentum(self.momentum)

    def share(self, updates: int, steps: int) -> float:
        if not self.warmup:
            return self.momentum
        return max(self.momentum, 9.0 / (10.0 + updates))


@dataclass(frozen=True, kw_only=True)
class StochasticAverage:
    """`stochastic`: 1 / (1 + updates), the plain mean (Izmailov et al., 2018; MMEngine's StochasticWeightAverage)."""

    def share(self, updates: int, steps: int) -> float:
        return 1.0 / (1.0 + updates)


@dataclass(frozen=True, kw_only=True)
class MomentumAnnealing:
    """`momentum_annealing`: max(momentum, gamma / (gamma + steps)) (MMEngine's MomentumAnnealingEMA)."""

    momentum: float = MOMENTUM
    gamma: float = 100.0

    def __post_init__(self) -> None:
        _check_momentum(self.momentum)
        check_above_zero(gamma=self.gamma)

    def share(self, updates: int, steps: int) -> float:
        return max(self.momentum, self.gamma / (self.gamma + steps))


@dataclass(frozen=True, kw_only=True)
class ExpMomentum:
    """`exp_momentum`: momentum + (1 - momentum) * exp(-(1 + steps) / gamma) (MMDetection's ExpMomentumEMA, from
    YOLOX)."""

    momentum: float = MOMENTUM
    gamma: float = 2000.0

    def __post_init__(self) -> None:
        _check_momentum(self.momentum)
        check_above_zero(gamma=self.gamma)

    def share(self, updates: int, steps: int) -> float:
        return self.momentum + (1.0 - self.momentum) * math.exp(-(1.0 + steps) / self.gamma)


@dataclass(frozen=True, kw_only=True)
class LinearMomentum:
    """`linear_momentum`: min(momentum, (1 + steps) / (warm_up_steps + steps)) (MMDetection's LinearMomentumEMAHook).

    The share grows towards `momentum` only if that is above 1 / warm_up_steps. The default momentum is below it, so
    that the share is constant. There are two differences from MMDetection. Its bound is momentum ** interval, which
    would nearly stop the average here, where `momentum` is the share of the new weights. Its average begins with the
    weights before the first step, here it begins with those of the first update.
    """

    momentum: float = MOMENTUM
    warm_up_steps: int = WARM_UP_STEPS

    def __post_init__(self) -> None:
        _check_momentum(self.momentum)
        check_at_least(1, warm_up_steps=self.warm_up_steps)

    def share(self, updates: int, steps: int) -> float:
        return min(self.momentum, (1.0 + steps) / (self.warm_up_steps + steps))


FORMULAS: dict[str, type[Formula]] = {
    "exponential": ExponentialAverage,
    "stochastic": StochasticAverage,
    "momentum_annealing": MomentumAnnealing,
    "exp_momentum": ExpMomentum,
    "linear_momentum": LinearMomentum,
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
    for name in options:
        having = [other for other, formula in FORMULAS.items() if name in _options_of(formula)]
        if ema_type not in having:
            raise UserError(
                f"the ema_type {ema_type} has no {name}", key=name, remedy=f"Leave it out, or use {any_of(having)}."
            )
    return FORMULAS[ema_type](**options)


def _options_of(formula: Any) -> set[str]:
    return {field.name for field in fields(formula)}


def _check_momentum(momentum: float) -> None:
    if not 0.0 < momentum < 1.0:
        raise UserError(
            f"{momentum} is not between 0 and 1",
            key="momentum",
            remedy="It is the share of the new weights in each update: 0.0002, not 0.9998.",
        )
