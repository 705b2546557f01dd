"""Schedules as functions of the step. Words and values are those of MMEngine 0.10.7 for the schedules that it has.

Each class is one schedule; `value` returns the value of step k out of `length` steps. A step is an optimizer step or an
epoch. Nothing depends on the way to step k, so a resumed run, also a longer one, needs no state. The arguments are
explained in `hydraloop/schemas/scheduler.py`.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar


class Function:
    """A schedule as a function of the step and of the value that it receives. A custom one overrides `value`."""

    lengths: ClassVar[tuple[str, ...]] = ()
    """Arguments that count steps; `convert_to_iter_based` multiplies them by the steps of an epoch."""
    lowest_after: ClassVar[str | None] = None
    """The argument with the number of steps after which the value stays at its lowest."""

    def value(self, k: int, length: int, value: float, initial: float) -> float:
        """Return the value of step k.

        Args:
            k: 0 .. length - 1.
            length: `end - begin`.
            value: what the schedules before this one make of `initial` in this step.
            initial: what the optimizer was given.
        """
        raise NotImplementedError


class _Factor(Function):
    """The value times a factor."""

    def value(self, k: int, length: int, value: float, initial: float) -> float:
        return value * self.scale(k, length)

    def scale(self, k: int, length: int) -> float:
        """Return the factor of step k."""
        raise NotImplementedError


@dataclass(frozen=True)
class Constant(_Factor):
    """The value times `factor`; the last step has the whole value again."""

    factor: float = 1 / 3

    def scale(self, k: int, length: int) -> float:
        return self.factor if k == 0 or k < length - 1 else 1.0


@dataclass(frozen=True)
class Linear(_Factor):
    """The value times a factor that goes from `start_factor` to `end_factor` in `total_iters` steps, and stays.

    `total_iters` None: `length - 1`, so that the last step has `end_factor`.
    """

    start_factor: float
    end_factor: float = 1.0
    total_iters: int | None = None
    lengths: ClassVar = ("total_iters",)

    def scale(self, k: int, length: int) -> float:
        return self.start_factor + (self.end_factor - self.start_factor) * _share(k, self.total_iters, length)


@dataclass(frozen=True)
class Exponential(_Factor):
    """The value times `gamma` in each step; converted from epochs, in each optimizer step, as in MMEngine."""

    gamma: float

    def scale(self, k: int, length: int) -> float:
        return self.gamma**k


@dataclass(frozen=True)
class Step(_Factor):
    """The value times `gamma` every `step_size` steps."""

    step_size: int
    gamma: float = 0.1
    lengths: ClassVar = ("step_size",)

    def scale(self, k: int, length: int) -> float:
        return self.gamma ** (k // self.step_size)


@dataclass(frozen=True)
class MultiStep(_Factor):
    """The value times `gamma` at each of the ascending `milestones`."""

    milestones: Sequence[int]
    gamma: float = 0.1
    lengths: ClassVar = ("milestones",)

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
class CosineRestart(Function):
    """Half a cosine from `initial` down to `eta_min`, again in each of the `periods`. Sets the value absolutely.

    Args:
        periods: steps of each period; after the last, the value stays.
        restart_weights: of `initial`, with which each period begins; None: 1.
        eta_min: the lowest value.
    """

    periods: Sequence[int]
    restart_weights: Sequence[float] | None = None
    eta_min: float = 0.0
    lengths: ClassVar = ("periods",)

    def __post_init__(self) -> None:
        if self.restart_weights is not None and len(self.restart_weights) != len(self.periods):
            raise ValueError("restart_weights must have as many numbers as periods")

    def value(self, k: int, length: int, value: float, initial: float) -> float:
        k = min(k, sum(self.periods) - 1)
        number = 0
        while k >= self.periods[number]:
            k -= self.periods[number]
            number += 1
        weight = 1.0 if self.restart_weights is None else self.restart_weights[number]
        return _cosine(k / self.periods[number], initial * weight, self.eta_min)


@dataclass(frozen=True)
class Poly(Function):
    """Down to `eta_min`, with a power of the share of the `total_iters` steps that is left.

    `total_iters` None: `length - 1`, so that the last step has `eta_min`.
    """

    power: float = 0.9
    eta_min: float = 0.0
    total_iters: int | None = None
    lengths: ClassVar = ("total_iters",)
    lowest_after: ClassVar = "total_iters"

    def value(self, k: int, length: int, value: float, initial: float) -> float:
        left: float = (1 - _share(k, self.total_iters, length)) ** self.power
        return self.eta_min + (value - self.eta_min) * left


@dataclass(frozen=True)
class OneCycle(Function):
    """Up from a low value to `max_lr` and down to a far lower one; torch's `OneCycleLR`. Sets the value absolutely."""

    max_lr: Any = None
    total_steps: int | None = None
    pct_start: float = 0.3
    anneal_strategy: str = "cos"
    cycle_momentum: bool = True
    base_momentum: float = 0.85
    max_momentum: float = 0.95
    div_factor: float = 25.0
    final_div_factor: float = 1e4
    three_phase: bool = False
    lengths: ClassVar = ("total_steps",)
    lowest_after: ClassVar = "total_steps"

    def value(self, k: int, length: int, value: float, initial: float) -> float:
        top = initial if self.max_lr is None else self.max_lr
        first = top / self.div_factor
        return self.between(k, length, first, top, first / self.final_div_factor)

    def between(self, k: int, length: int, first: float, top: float, last: float) -> float:
        """Return the value of step k of a cycle from `first` to `top` to `last`."""
        steps = self.total_steps or length
        up = self.pct_start * steps - 1
        phases = [(up, first, top), (steps - 1, top, last)]
        if self.three_phase:
            phases = [(up, first, top), (2 * up, top, first), (steps - 1, first, last)]
        k = min(k, steps - 1)
        start = 0.0
        for end, high, low in phases:  # noqa: B007
            if k <= end:
                break
            start = end
        share = (k - start) / (end - start) if end > start else 1.0
        if self.anneal_strategy == "linear":
            return high + (low - high) * share
        return _cosine(share, high, low)


@dataclass(frozen=True)
class CycledMomentum(Function):
    """The momentum of a `OneCycle`, lowest where its value is highest."""

    cycle: OneCycle

    def value(self, k: int, length: int, value: float, initial: float) -> float:
        return self.cycle.between(k, length, self.cycle.max_momentum, self.cycle.base_momentum, self.cycle.max_momentum)


@dataclass(frozen=True)
class WarmupCosine(_Factor):
    """A straight line up to the value, then half a cosine down; the lowest value stays."""

    total_iters: int | None = None
    warmup_iters: int | None = None
    start_factor: float = 0.01
    min_lr_ratio: float = 0.0
    lengths: ClassVar = ("total_iters", "warmup_iters")
    lowest_after: ClassVar = "total_iters"

    def scale(self, k: int, length: int) -> float:
        total = self.total_iters or length
        warm_up = total // 20 if self.warmup_iters is None else self.warmup_iters
        if k < warm_up:
            return self.start_factor + (1 - self.start_factor) * k / warm_up
        if k >= total:
            return self.min_lr_ratio
        return _cosine((k - warm_up) / (total - warm_up), 1.0, self.min_lr_ratio)


@dataclass(frozen=True)
class YOLOX(_Factor):
    """A warm-up with the square of the step, a cosine, and the lowest value for the last epochs.

    The values of MMDetection's `YOLOXLrUpdaterHook`.
    """

    total_iters: int | None = None
    warmup_iters: int | None = None
    num_last_epochs: int | None = None
    warmup_ratio: float = 1.0
    min_lr_ratio: float = 0.05
    lengths: ClassVar = ("total_iters", "warmup_iters", "num_last_epochs")
    lowest_after: ClassVar = "total_iters"

    def scale(self, k: int, length: int) -> float:
        total = self.total_iters or length
        warm_up = total // 60 if self.warmup_iters is None else self.warmup_iters
        if k < warm_up:
            return self.warmup_ratio * ((k + 1) / warm_up) ** 2
        last = total // 20 if self.num_last_epochs is None else self.num_last_epochs
        if k + 1 >= total - last:
            return self.min_lr_ratio
        return _cosine((k + 1 - warm_up) / (total - warm_up - last), 1.0, self.min_lr_ratio)


def _cosine(share: float, high: float, low: float) -> float:
    """Half a cosine from `high` at share 0 to `low` at share 1."""
    return low + (high - low) * (1 + math.cos(math.pi * share)) / 2


def _share(k: int, total_iters: int | None, length: int) -> float:
    """The share of `total_iters` that is done, 0..1."""
    steps = length - 1 if total_iters is None else total_iters
    return min(k, steps) / steps if steps else 0.0
