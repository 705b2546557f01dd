"""Plateau: the only schedule with a state, because it follows a metric."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hydraloop.optim.option_ranges import BETWEEN_0_AND_1, COUNT_FROM_0, FROM_0, one_of
from hydraloop.optim.schedule_functions import Function


@dataclass
class Plateau(Function):
    """The value times `factor` each time a metric has stopped improving, as in torch and MMEngine."""

    mode: str | None = field(default=None, metadata=one_of("min", "max"))
    factor: float = field(default=0.1, metadata=BETWEEN_0_AND_1)
    patience: int = field(default=3, metadata=COUNT_FROM_0)
    threshold: float = field(default=1e-4, metadata=FROM_0)
    threshold_mode: str = field(default="rel", metadata=one_of("rel", "abs"))
    cooldown: int = field(default=0, metadata=COUNT_FROM_0)
    min_lr: float = field(default=0.0, metadata=FROM_0)
    eps: float = field(default=1e-8, metadata=FROM_0)
    best: float | None = field(default=None, init=False)
    bad: int = field(default=0, init=False)
    """Validations since the last improvement."""
    cooling: int = field(default=0, init=False)
    """Remaining validations of the cooldown."""
    reductions: int = field(default=0, init=False)

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

    def load_state_dict(self, state: dict[str, float | None]) -> None:
        """Continue from what `state_dict` returned."""
        vars(self).update(state)

    def _is_better(self, metric: float) -> bool:
        if self.best is None:
            return not math.isnan(metric)
        sign = 1 if self.mode == "max" else -1
        change = self.threshold * (self.best if self.threshold_mode == "rel" else 1.0)
        return sign * metric > sign * (self.best + sign * change)
