"""Schedules as functions of the step. Schedules that MMEngine has too have the names and values of MMEngine 0.10.7.

Each class is one schedule, and `value` returns its value at step k. A step is an optimizer step or an epoch. The value
depends only on k, so a resumed run, also a longer one, needs no state; `Plateau` has one, because it follows a metric.
`hydraloop/schemas/scheduler.py` explains the
options.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from hydraloop.errors import UserError
from hydraloop.schemas.option_checks import check_choice


class Function:
    """A schedule as a function of the step and of the value before it. A custom schedule overrides `value`.

    Most of the built-in schedules override `scale`: they multiply the value by a factor.
    """

    lengths: ClassVar[tuple[str, ...]] = ()
    """Options that count steps; `convert_to_iter_based` multiplies them by the steps of an epoch."""
    mode: str | None = None
    """`min` or `max` of a function that follows a metric; None: not known yet."""

    def value(self, k: int, length: int, value: float, initial: float) -> float:
        """Return the value at step k.

        Args:
            k: 0 .. length - 1.
            length: `end - begin`.
            value: the result of the schedules before this one at this step; `initial` for the first schedule.
            initial: the value of the optimizer's config.
        """
        return value * self.scale(k, length)

    def scale(self, k: int, length: int) -> float:
        """Return the factor at step k."""
        raise NotImplementedError

    def observe(self, metric: float) -> None:
        """Count a validation; only for a function that follows a metric."""

    def state_dict(self) -> dict[str, float | None]:
        """Return the state; a function of the step has none."""
        return {}

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Continue from what `state_dict` returned."""
        vars(self).update(state)


@dataclass(frozen=True)
class Constant(Function):
    """The value times `factor`; the last step has the full value again."""

    factor: float = 1 / 3

    def scale(self, k: int, length: int) -> float:
        return self.factor if k == 0 or k < length - 1 else 1.0


@dataclass(frozen=True)
class Linear(Function):
    """The value times a factor that goes from `start_factor` to `end_factor` in `total_iters` steps, and stays there.

    If `total_iters` is None, it is `length - 1`, so that the last step has `end_factor`.
    """

    start_factor: float
    end_factor: float = 1.0
    total_iters: int | None = None
    lengths: ClassVar = ("total_iters",)

    def scale(self, k: int, length: int) -> float:
        return self.start_factor + (self.end_factor - self.start_factor) * _share(k, self.total_iters, length)


@dataclass(frozen=True)
class Exponential(Function):
    """The value times `gamma` at each step. Converted from epochs: at each optimizer step, as in MMEngine."""

    gamma: float

    def scale(self, k: int, length: int) -> float:
        return self.gamma**k


@dataclass(frozen=True)
class MultiStep(Function):
    """The value times `gamma` at each of the ascending `milestones`."""

    milestones: Sequence[int]
    gamma: float = 0.1
    lengths: ClassVar = ("milestones",)

    def __post_init__(self) -> None:
        ascending = sorted(set(self.milestones))
        if list(self.milestones) != ascending:
            raise UserError("must be in ascending order", key="milestones", remedy=f"Use {ascending}.")

    def scale(self, k: int, length: int) -> float:
        return self.gamma ** bisect_right(self.milestones, k)


@dataclass(frozen=True)
class Cosine(Function):
    """Half a cosine down to `eta_min` in `T_max` steps (None: `length`), then up to `initial` and down again."""

    T_max: int | None = None
    eta_min: float = 0.0
    lengths: ClassVar = ("T_max",)

    def value(self, k: int, length: int, value: float, initial: float) -> float:
        steps = self.T_max or length
        return _cosine(k / steps, value if k <= steps else initial, self.eta_min)


@dataclass(frozen=True)
class Poly(Function):
    """Down to `eta_min`, with a power of the share of the `total_iters` steps that is left.

    If `total_iters` is None, it is `length - 1`, so that the last step has `eta_min`.
    """

    power: float = 0.9
    eta_min: float = 0.0
    total_iters: int | None = None
    lengths: ClassVar = ("total_iters",)

    def value(self, k: int, length: int, value: float, initial: float) -> float:
        left: float = (1 - _share(k, self.total_iters, length)) ** self.power
        return self.eta_min + (value - self.eta_min) * left


@dataclass(frozen=True)
class WarmupCosine(Function):
    """A straight line up to the value, then half a cosine down. The last value stays."""

    total_iters: int | None = None
    warmup: int | None = None
    start_factor: float = 0.01
    min_lr_ratio: float = 0.0
    lengths: ClassVar = ("total_iters", "warmup")

    def scale(self, k: int, length: int) -> float:
        total = self.total_iters or length
        warmup = total // 20 if self.warmup is None else self.warmup
        if k < warmup:
            return self.start_factor + (1 - self.start_factor) * k / warmup
        if k >= total:
            return self.min_lr_ratio
        return _cosine((k - warmup) / (total - warmup), 1.0, self.min_lr_ratio)


@dataclass(frozen=True)
class YOLOX(Function):
    """MMDetection's `YOLOXLrUpdaterHook`: a quadratic warm-up, a cosine, and the lowest value for the last epochs."""

    total_iters: int | None = None
    warmup: int | None = None
    num_last_epochs: int | None = None
    warmup_ratio: float = 1.0
    min_lr_ratio: float = 0.05
    lengths: ClassVar = ("total_iters", "warmup", "num_last_epochs")

    def scale(self, k: int, length: int) -> float:
        total = self.total_iters or length
        warmup = total // 60 if self.warmup is None else self.warmup
        if k < warmup:
            return self.warmup_ratio * ((k + 1) / warmup) ** 2
        last = total // 20 if self.num_last_epochs is None else self.num_last_epochs
        if k + 1 >= total - last:
            return self.min_lr_ratio
        return _cosine((k + 1 - warmup) / (total - warmup - last), 1.0, self.min_lr_ratio)


@dataclass
class Plateau(Function):
    """The value times `factor` each time a metric has stopped improving, as in torch and MMEngine."""

    mode: str | None = None
    factor: float = 0.1
    patience: int = 3
    threshold: float = 1e-4
    threshold_mode: str = "rel"
    cooldown: int = 0
    min_lr: float = 0.0
    eps: float = 1e-8
    best: float | None = field(default=None, init=False)
    bad: int = field(default=0, init=False)
    """Validations since the last improvement."""
    cooling: int = field(default=0, init=False)
    """Remaining validations of the cooldown."""
    reductions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        check_choice(("min", "max"), mode=self.mode)
        check_choice(("rel", "abs"), threshold_mode=self.threshold_mode)

    def value(self, k: int, length: int, value: float, initial: float) -> float:
        """Return the value after all reductions."""
        for _ in range(self.reductions):
            reduced = max(value * self.factor, self.min_lr)
            if value - reduced > self.eps:
                value = reduced
        return value

    def observe(self, metric: float) -> None:
        """Count a validation."""
        if self._is_better(metric):
            self.best, self.bad = metric, 0
        else:
            self.bad += 1
        if self.cooling:
            self.cooling -= 1
            self.bad = 0
        if self.bad > self.patience:
            self.reductions += 1
            self.cooling, self.bad = self.cooldown, 0

    def state_dict(self) -> dict[str, float | None]:
        """Return the counts and the best value."""
        return {"best": self.best, "bad": self.bad, "cooling": self.cooling, "reductions": self.reductions}

    def _is_better(self, metric: float) -> bool:
        if self.best is None:
            return not math.isnan(metric)
        sign = 1 if self.mode == "max" else -1
        change = self.threshold * (self.best if self.threshold_mode == "rel" else 1.0)
        return sign * metric > sign * (self.best + sign * change)


def _cosine(share: float, high: float, low: float) -> float:
    """Return half a cosine from `high` at share 0 to `low` at share 1."""
    return low + (high - low) * (1 + math.cos(math.pi * share)) / 2


def _share(k: int, total_iters: int | None, length: int) -> float:
    """Return the share of `total_iters` that is done, 0..1."""
    steps = length - 1 if total_iters is None else total_iters
    return min(k, steps) / steps if steps else 0.0
