"""The axes of a sweep: from the number of a job to its overrides, by arithmetic. Nothing is stored for each job."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Axis:
    """Values that a sweep multiplies with those of other axes."""

    keys: tuple[str, ...]
    """What it sets: one key, several that advance together, or all keys of a file of jobs. Without a leading `+`."""
    values: tuple[tuple[str, ...], ...]
    """The overrides of each value: `(("optimizer.lr=1e-3",), ("optimizer.lr=1e-2",))`."""


@dataclass(frozen=True, slots=True)
class Axes:
    """The jobs of a sweep. The last axis changes fastest, as in Hydra."""

    axes: tuple[Axis, ...]
    """In the order of the overrides. A constant is an axis of one value."""

    @property
    def count(self) -> int:
        """The number of jobs: all combinations."""
        return prod(len(axis.values) for axis in self.axes)

    @property
    def keys(self) -> list[str]:
        """All keys that a job may set."""
        return [key for axis in self.axes for key in axis.keys]

    @property
    def swept(self) -> tuple[str, ...]:
        """The keys of axes with several values."""
        return tuple(dict.fromkeys(key for axis in self.axes if len(axis.values) > 1 for key in axis.keys))

    def lines(self, number: int) -> tuple[str, ...]:
        """Return the overrides of a job."""
        values = self._values(number)
        return tuple(line for axis, value in zip(self.axes, values, strict=True) for line in axis.values[value])

    def first_jobs(self) -> list[dict[int, int]]:
        """Return, for each axis, the first job with each of its values."""
        numbers = range(self.count)[::-1]
        sizes = [len(axis.values) for axis in self.axes]
        steps = [prod(sizes[index + 1 :]) for index in range(len(sizes))]
        return [{number // step % size: number for number in numbers} for size, step in zip(sizes, steps, strict=True)]

    def _values(self, number: int) -> list[int]:
        """Return the index of the value of each axis in a job."""
        values = []
        for axis in reversed(self.axes):
            number, value = divmod(number, len(axis.values))
            values.append(value)
        return values[::-1]
