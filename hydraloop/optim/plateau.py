"""Plateau: the one schedule with a state, since it follows a metric."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from hydraloop.optim.functions import Function


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
    """Validations without improvement since the last one with."""
    cooling: int = field(default=0, init=False)
    """Validations until the cooldown is over."""
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
        """Take over what `state_dict` returned."""
        vars(self).update(state)

    def _is_better(self, metric: float) -> bool:
        if self.best is None:
            return not math.isnan(metric)
        sign = 1 if self.mode == "max" else -1
        change = self.threshold * (self.best if self.threshold_mode == "rel" else 1.0)
        return sign * metric > sign * (self.best + sign * change)
