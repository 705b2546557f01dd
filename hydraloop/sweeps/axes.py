"""The axes of a sweep: from the number of a job to its overrides, by arithmetic. Nothing is stored for each job."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod

from hydraloop.errors import UserError
from hydraloop.run_files.result import PAUSE
from hydraloop.safety.secrets import mask_overrides

_NEW = "To start a new sweep, leave sweep.resume and hydra.sweep.dir out."


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
    order: Sequence[int]
    """The position of each job in the product of the axes. It is a range, unless the sweep was widened: then new jobs
    have the highest numbers."""

    @classmethod
    def product(cls, axes: Sequence[Axis]) -> Axes:
        """Return all combinations."""
        return cls(tuple(axes), range(prod(len(axis.values) for axis in axes)))

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
        values = self._values(self.order[number])
        return tuple(line for axis, value in zip(self.axes, values, strict=True) for line in axis.values[value])

    def swept_lines(self, number: int) -> tuple[str, ...]:
        """Return the overrides of a job that other jobs do not have."""
        values = zip(self.axes, self._values(self.order[number]), strict=True)
        return tuple(line for axis, value in values if len(axis.values) > 1 for line in axis.values[value])

    def first_jobs(self) -> list[dict[int, int]]:
        """Return, for each axis, the first job with each of its values."""
        positions = list(enumerate(self.order))[::-1]
        sizes = [len(axis.values) for axis in self.axes]
        steps = [prod(sizes[index + 1 :]) for index in range(len(sizes))]
        return [
            {position // step % size: number for number, position in positions}
            for size, step in zip(sizes, steps, strict=True)
        ]

    def masked(self) -> Axes:
        """Return the axes with secrets masked."""
        axes = (
            replace(axis, values=tuple(tuple(mask_overrides(value)) for value in axis.values)) for axis in self.axes
        )
        return replace(self, axes=tuple(axes))

    def widened(self, stored: Axes) -> Axes:
        """Return these axes, with the jobs of `stored` under their old numbers and new jobs after them.

        Args:
            stored: masked, as in `sweep.json`. Masked values are equal if they are at the same place among them. Its
                `engine.pause_after` may be another one, unless it is swept.

        Raises:
            UserError: these axes do not contain all jobs of `stored`.
        """
        stored, own = (
            replace(axes, axes=tuple(axis for axis in axes.axes if axis.keys != (PAUSE,) or len(axis.values) > 1))
            for axes in (stored, self)
        )
        before, now = ([",".join(axis.keys) for axis in axes.axes] for axes in (stored, own))
        pairs = list(zip(own.masked().axes, stored.axes, strict=False))
        if len(before) != len(now) or not all(set(old.keys) <= set(new.keys) for new, old in pairs):
            problem = f"the overrides of the sweep are {_listed(before)}; this command line has {_listed(now)}"
            raise UserError(problem, key="sweep.resume", remedy=f"Give the same keys in the same order. {_NEW}")
        places = [_places(new, old) for new, old in pairs]
        order = array("q")
        for position in stored.order:
            moved = 0
            for axis, place, value in zip(own.axes, places, stored._values(position), strict=True):
                moved = moved * len(axis.values) + place[value]
            order.append(moved)
        old_positions = set(order)
        order.extend(position for position in self.order if position not in old_positions)
        return Axes(self.axes, order)

    def _values(self, position: int) -> list[int]:
        """Return the index of the value of each axis."""
        values = []
        for axis in reversed(self.axes):
            position, value = divmod(position, len(axis.values))
            values.append(value)
        return values[::-1]


def _places(new: Axis, old: Axis) -> list[int]:
    """Return where each value of `old` is in `new`. The same value twice is two values."""
    places: dict[tuple[str, ...], list[int]] = {}
    for index in reversed(range(len(new.values))):
        places.setdefault(new.values[index], []).append(index)
    missing = [value for value in old.values if not places.get(value)]
    found = [places[value].pop() for value in old.values if places.get(value)]
    if len(found) < len(old.values):
        shown = _listed([" ".join(value) for value in missing or old.values])
        problem = f"the sweep has {shown}, which this command line has not, or not as often"
        raise UserError(problem, key=",".join(old.keys), remedy=f"Add values, but remove none. {_NEW}")
    return found


def _listed(names: Sequence[str]) -> str:
    """Join up to five names."""
    return ", ".join([*names[:5], *(["…"] if len(names) > 5 else [])]) or "none"
