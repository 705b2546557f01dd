"""Statistics of how long iterations take, in bounded memory. Without torch."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import exp, log

_PER_OCTAVE = 16
_SCALE = _PER_OCTAVE / log(2.0)
_NOTHING = 1e-9
"""Seconds added before the logarithm: a duration of 0, below the clock's resolution, has one too."""
_SORT_IN_AT = 256
"""Durations kept before they are sorted into the histogram: in one go that is several times faster than one by one."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the iterations of this process took; all times in seconds."""

    iterations: int
    total: float
    mean: float
    p50: float
    """The median, within 2.2 %."""
    p90: float
    """Nine in ten iterations took no longer, within 2.2 %."""
    max: float
    data_share: float
    """Share of `total` in the loader and in copying batches to the device, 0 .. 1."""
    hook_share: float | None
    """Share of the time in hooks, 0 .. 1, over the iterations that follow another one directly; None without any."""


class Durations:
    """Count, sum, extremes and quantiles of any number of durations.

    Quantiles come from a histogram with 16 buckets an octave (a factor of 2): bucket edges are 4.4 % apart, so that a
    quantile is at most 2.2 % off. From a nanosecond to a day these are some 750 counters, whatever the number of
    durations.
    """

    def __init__(self) -> None:
        self._pending: list[float] = []
        self._count = 0
        self._total = self._max = 0.0
        self._buckets: defaultdict[int, int] = defaultdict(int)

    def add(self, seconds: float) -> None:
        """Count one duration, at least 0; less than 0.1 µs, since they are sorted in by the hundred."""
        self._pending.append(seconds)
        if len(self._pending) >= _SORT_IN_AT:
            self._sort_in()

    def _sort_in(self) -> None:
        for seconds in self._pending:
            # +4096: int() rounds towards zero, which would put two buckets into one around a second.
            self._buckets[int(log(seconds + _NOTHING) * _SCALE + 4096)] += 1
        self._count += len(self._pending)
        self._total += sum(self._pending)
        self._max = max([self._max, *self._pending])
        self._pending.clear()

    @property
    def count(self) -> int:
        """How many."""
        return self._count + len(self._pending)

    @property
    def total(self) -> float:
        """Seconds."""
        self._sort_in()
        return self._total

    @property
    def max(self) -> float:
        """Seconds; 0 where there is nothing."""
        self._sort_in()
        return self._max

    @property
    def mean(self) -> float:
        """Seconds; 0 where there is nothing."""
        return self.total / self.count if self.count else 0.0

    def quantile(self, q: float) -> float:
        """The duration, in seconds, that the share `q` (0 .. 1) of all does not exceed; 0 where there is nothing."""
        self._sort_in()
        below = 0
        for bucket in sorted(self._buckets):
            below += self._buckets[bucket]
            if below >= q * self.count:
                return min(exp((bucket + 0.5 - 4096) / _SCALE), self.max)
        return 0.0
