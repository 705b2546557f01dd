"""The axes of a sweep: from the number of a job to its overrides, by arithmetic. Nothing is stored for each job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Axis:
    """Values that a sweep multiplies with those of other axes."""

    keys: tuple[str, ...]
    """What it sets: one key, or several that advance together."""
    values: tuple[tuple[str, ...], ...]
    """The overrides of each value, one for each key: `(("optimizer.lr=1e-3",), ("optimizer.lr=1e-2",))`."""


@dataclass(frozen=True, slots=True)
class Axes:
    """The jobs of a sweep. The last axis changes fastest, as in Hydra."""

    axes: tuple[Axis, ...]
    """In the order of the overrides. A constant is an axis of one value."""
    order: Sequence[int]
    """The position of each job in the product of the axes. It is a range, unless a condition leaves jobs out, or the
    sweep was widened: then new jobs have the highest numbers."""

    @property
    def count(self) -> int:
        """The number of jobs."""
        return len(self.order)

    @property
    def swept(self) -> tuple[Axis, ...]:
        """The axes with several values."""
        return tuple(axis for axis in self.axes if len(axis.values) > 1)

    def lines(self, number: int) -> tuple[str, ...]:
        """Return the overrides of a job."""
        raise NotImplementedError

    def swept_lines(self, number: int) -> tuple[str, ...]:
        """Return the overrides of a job that other jobs do not have."""
        raise NotImplementedError
