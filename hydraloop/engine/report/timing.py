"""Statistics of the durations of iterations, in bounded memory. Does not import torch."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_KEPT = 100_000
"""Latest durations that are kept for quantiles, in 3 MB."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Statistics of the iterations of this process; times in seconds."""

    iterations: int
    total: float
    mean: float
    p50: float
    """The median of the latest 100,000 iterations."""
    p90: float
    """90 % of the latest 100,000 iterations took no longer."""
    max: float
    data_share: float
    """Share of `total` (0 .. 1) spent in the loader and in copying batches to the device."""


class Durations:
    """Count, sum and maximum of any number of durations, and quantiles of the latest 100,000. All are in seconds."""

    def __init__(self) -> None:
        self.count = 0
        self.total = self.max = 0.0
        self._latest: deque[float] = deque(maxlen=_KEPT)

    def add(self, seconds: float) -> None:
        """Add a duration. Takes about 0.1 µs."""
        self.count += 1
        self.total += seconds
        if seconds > self.max:
            self.max = seconds
        self._latest.append(seconds)

    @property
    def mean(self) -> float:
        """The mean; 0 without durations."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """Return the duration that a share `q` (above 0, up to 1) does not exceed; 0 without durations."""
        return sorted(self._latest)[math.ceil(q * len(self._latest)) - 1] if self._latest else 0.0
