"""The space of a search: what each dimension may be, and the overrides of a trial. Imports no Optuna."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from hydraloop.errors import UserError
from hydraloop.safety.secrets import mask_overrides
from hydraloop.sweeps.axes import Axis

Value = float | int | str
Params = Mapping[str, Value]
"""The values of a trial by key, without those of inactive dimensions. A choice is its text, as typed."""

_LOG = "log"
"""The tag of a dimension with a logarithmic scale."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """What a trial may choose for a key: one of several texts, or a number between two ends."""

    key: str
    """Without a leading `+`."""
    element: str
    """With it: the override is `<element>=<value>`."""
    choices: tuple[str, ...] = ()
    """As typed. Empty: a number. One: a constant."""
    low: float = 0.0
    high: float = 0.0
    """The ends, both included."""
    step: float | None = None
    is_int: bool = False
    is_log: bool = False
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The dimension is active if each of these keys has one of these choices. Otherwise its key is not set."""

    @property
    def is_constant(self) -> bool:
        """Whether there is nothing to choose."""
        return len(self.choices) == 1

    @property
    def line(self) -> str:
        """The override of a constant. `~key` has no value."""
        return f"{self.element}={self.choices[0]}" if self.choices[0] or self.element[0] != "~" else self.element

    def is_active(self, params: Params) -> bool:
        """Return whether a trial with these values sets the key."""
        return all(params.get(key) in allowed for key, allowed in self.only.items())

    def ends(self) -> tuple[Value, ...]:
        """Return all choices, or the two ends."""
        if self.choices:
            return self.choices
        return (int(self.low), int(self.high)) if self.is_int else (self.low, self.high)

    def read(self, text: str, *, key: str) -> Value:
        """Return a value that is written as text.

        Args:
            key: the option that gives it.

        Raises:
            UserError: the dimension has no such value.
        """
        value: Value = text
        if not self.choices:
            try:
                value = float(text)
                value = int(value) if self.is_int and value.is_integer() else value
            except ValueError:
                value = math.nan
        if not (value in self.choices if self.choices else self._has(value)):
            raise UserError(f"{text} is not in {self}", key=key, remedy="Use one of its values.")
        return value

    def _has(self, value: Any) -> bool:
        """Return whether a number is between the ends, and at a step."""
        if not self.low <= value <= self.high or (self.is_int and not isinstance(value, int)):
            return False
        steps = 0.0 if self.step is None else (value - self.low) / self.step
        return math.isclose(steps, round(steps), abs_tol=1e-8)

    def __str__(self) -> str:
        """Return the override, as one would type it."""
        if self.choices:
            return f"{self.element}={','.join(self.choices)}"
        low, high = self.ends()
        span = (
            f"interval({low},{high})" if self.step is None else f"range({low},{self.high + self.step:g},{self.step:g})"
        )
        span = f"tag(log,{span})" if self.is_log else span
        return f"{self.element}={f'int({span})' if self.is_int and self.step is None else span}"


@dataclass(frozen=True, slots=True)
class Space:
    """All dimensions of a search, in the order of the overrides."""

    dimensions: tuple[Dimension, ...]
    repeats: Dimension | None = None
    """The key over which results are averaged, if it has several values: each trial is run with each of them."""

    @property
    def searched(self) -> tuple[Dimension, ...]:
        """The dimensions with something to choose, those first on which others depend."""
        found = [one for one in self.dimensions if not one.is_constant]
        return tuple(sorted(found, key=lambda one: bool(one.only)))

    @property
    def varied(self) -> tuple[Dimension, ...]:
        """The dimensions that differ between jobs."""
        return self.searched if self.repeats is None else (*self.searched, self.repeats)

    @property
    def keys(self) -> list[str]:
        """All keys that a job may set."""
        repeats = [] if self.repeats is None else [self.repeats.key]
        return [*(one.key for one in self.dimensions), *repeats]

    @property
    def repeat_count(self) -> int:
        """The number of jobs of a trial."""
        return 1 if self.repeats is None else len(self.repeats.choices)

    def lines(self, params: Params, repeat: int = 0) -> tuple[str, ...]:
        """Return the overrides of a job of a trial.

        Args:
            repeat: the number of the job in its trial, from 0.
        """
        lines = [one.line for one in self.dimensions if one.is_constant]
        lines += [f"{one.element}={params[one.key]}" for one in self.dimensions if one.key in params]
        if self.repeats is not None:
            lines.append(f"{self.repeats.element}={self.repeats.choices[repeat]}")
        return tuple(lines)

    def corners(self) -> Iterator[dict[str, Value]]:
        """Yield a trial with each choice and each end of each dimension, the first ones at first.

        The other dimensions have their first value. A condition of the dimension is met.
        """
        yield self._completed({})
        for one in self.searched:
            needed = {key: allowed[0] for key, allowed in one.only.items()}
            for value in one.ends():
                yield self._completed({**needed, one.key: value})

    def _completed(self, given: Params) -> dict[str, Value]:
        values: dict[str, Value] = {}
        for one in self.searched:
            if one.is_active(values):
                values[one.key] = given.get(one.key, one.ends()[0])
        return values

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Space:
        """Return the space that `dataclasses.asdict` and JSON have made into lists and mappings."""

        def dimension(one: Mapping[str, Any]) -> Dimension:
            only = {key: tuple(allowed) for key, allowed in one["only"].items()}
            return Dimension(**{**one, "choices": tuple(one["choices"]), "only": only})

        repeats = content["repeats"]
        return cls(tuple(map(dimension, content["dimensions"])), None if repeats is None else dimension(repeats))

    def masked(self) -> Space:
        """Return the space with secrets masked. Only constants have any."""
        masked = [
            replace(one, choices=(mask_overrides([one.line])[0].partition("=")[2],)) if one.is_constant else one
            for one in self.dimensions
        ]
        return replace(self, dimensions=tuple(masked))

    def check_same(self, stored: Space) -> None:
        """Refuse to continue a search over another space.

        Args:
            stored: the space of the search, masked.

        Raises:
            UserError: this one differs.
        """
        now, before = ([str(one) for one in space.varied] for space in (self.masked(), stored))
        if now != before:
            problem = f"the search is over {' '.join(before)}; this command line has {' '.join(now)}"
            remedy = "Give the same space. To start a new search, leave sweep.resume and hydra.sweep.dir out."
            raise UserError(problem, key="sweep.resume", remedy=remedy)


def space_of(keys: Sequence[str], numbers: Mapping[str, Override], axes: Sequence[Axis], average: str) -> Space:
    """Return the space that overrides describe.

    Args:
        keys: of all overrides, in their order.
        numbers: the overrides that name numbers by their ends.
        axes: all others.
        average: the key over which results are averaged.

    Raises:
        UserError: a dimension with no values, with a wrong end, or of secrets.
    """
    found = {key: _number(key, override) for key, override in numbers.items()}
    for axis in axes:
        (key,), values = axis.keys, tuple(line.partition("=")[2] for (line,) in axis.values)
        element = axis.values[0][0].partition("=")[0]
        if len(values) > 1 and mask_overrides([line for (line,) in axis.values]) != [line for (line,) in axis.values]:
            raise UserError("a search over secrets would write them", key=key, remedy="Give one value.")
        found[key] = Dimension(key, element, tuple(dict.fromkeys(values)))
    dimensions = {key: found[key] for key in keys}
    repeats: Dimension | None = dimensions.get(average)
    if repeats is None or repeats.is_constant:
        return Space(tuple(dimensions.values()))
    if not repeats.choices:
        remedy = f"List its values: {average}=0,1,2"
        raise UserError("results are averaged over a list of values, not over an interval", key=average, remedy=remedy)
    return Space(tuple(one for one in dimensions.values() if one is not repeats), repeats)


def is_number(override: Override) -> bool:
    """Return whether an override names numbers by their ends."""
    return isinstance(override.value(), IntervalSweep | RangeSweep)


def _number(key: str, override: Override) -> Dimension:
    """Return the dimension of `interval(…)` or `range(…)`.

    Raises:
        UserError: its ends are wrong.
    """
    value: Any = override.value()
    start: Any = value.start
    if isinstance(value, IntervalSweep):
        low, high, step = float(start), float(value.end or 0), None
        is_int = isinstance(start, int)
    else:
        listed = [float(text) for text in override.sweep_string_iterator()] or [0.0, -1.0]
        low, high, step = min(listed), max(listed), abs(float(value.step))  # in any order: shuffle(range(…))
        is_int = isinstance(start, int) and isinstance(value.step, int)
    is_log = _LOG in value.tags
    if not (low < high and math.isfinite(high - low)) or (is_log and low <= 0):
        why = "is too wide" if high - low == math.inf else "is empty"
        why = "begins at 0 or below, which has no logarithm" if is_log and low <= 0 < high else why
        problem = f"{override.input_line} {why}"
        raise UserError(problem, key=key, remedy="Write interval(1e-4,1e-1): the smaller end first.")
    if is_log and step is not None:
        raise UserError("a range has no logarithmic scale", key=key, remedy="Use tag(log,interval(…)).")
    return Dimension(key, override.get_key_element(), (), low, high, step, is_int, is_log)
