"""The formulas of `ema_type`: one function each, with its options, its source and its defaults.

A formula returns the share of the new weights in an update, above 0 and at most 1: `average += share * (weights -
average)`. The first update is a copy and needs no formula, so that `updates`, the number of updates done, is at least
1. `steps` is the number of optimizer steps since the first update (with `by_epoch`: of epochs): `updates * interval`.
MMEngine has the same name for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from hydraloop.errors import UserError, any_of, suggestion
from hydraloop.schemas.option_checks import check_above, check_at_least

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
    for name in options:
        having = [other for other, formula in FORMULAS.items() if name in (formula.__kwdefaults__ or ())]
        if ema_type not in having:
            raise UserError(
                f"the ema_type {ema_type} has no {name}", key=name, remedy=f"Leave it out, or use {any_of(having)}."
            )
    check_above(0, gamma=options.get("gamma"))
    check_at_least(1, warm_up_steps=options.get("warm_up_steps"))
    if not 0.0 < options.get("momentum", MOMENTUM) < 1.0:
        raise UserError(
            f"{options['momentum']} is not between 0 and 1",
            key="momentum",
            remedy="It is the share of the new weights in each update: 0.0002, not 0.9998.",
        )
    return partial(FORMULAS[ema_type], **options)
