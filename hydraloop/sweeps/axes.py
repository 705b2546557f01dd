"""Axes: the values that a sweep gives to keys, and the space of a search. Imports no Optuna."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain, product
from typing import Any

from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep

from hydraloop.errors import UserError
from hydraloop.files.secrets import mask_overrides

Lines = tuple[str, ...]
"""The overrides of a job."""
_LIST = "Let a search choose: sweep.trials=50. Or list its values: a,b,c or range(1,10,3)."


@dataclass(frozen=True, slots=True)
class Axis:
    """Values that a sweep multiplies with those of other axes."""

    keys: tuple[str, ...]
    """What it sets: one key, several that advance together, or all keys of a file of jobs. Without a leading `+`."""
    values: tuple[Lines, ...]
    """The overrides of each value: `(("optimizer.lr=1e-3",), ("optimizer.lr=1e-2",))`."""


def jobs_of(axes: Sequence[Axis]) -> Iterator[Lines]:
    """Yield the overrides of each job: all combinations. The last axis changes fastest, as in Hydra."""
    return (tuple(chain(*values)) for values in product(*(axis.values for axis in axes)))


def first_jobs(axes: Sequence[Axis], most: int) -> Iterator[Lines]:
    """Yield the first job, and the first one with each other value of each axis.

    Args:
        most: values of an axis, the first ones.
    """
    first = [axis.values[0] for axis in axes]
    yield tuple(chain(*first))
    for index, axis in enumerate(axes):
        for value in axis.values[1:most]:
            yield tuple(chain(*first[:index], value, *first[index + 1 :]))


def key_of(line: str) -> str:
    """Return the key of an override, without a leading `+`."""
    return line.partition("=")[0].lstrip("+")


def lines_of(override: Override) -> list[str]:
    """Return an override for each of its values.

    Raises:
        UserError: it cannot be enumerated (`interval(0,1)`), or has no values.
    """
    key, line = override.get_key_element(), override.input_line or ""
    if not override.is_sweep_override():
        is_number = isinstance(override.value(), bool | int | float)
        return [f"{key}={override.get_value_element_as_str()}" if is_number else line]  # 1e-3 is 0.001, as in a sweep
    if not override.is_discrete_sweep():
        raise UserError(f"{line} has no end", key=override.key_or_group, remedy=_LIST)
    lines = [f"{key}={value}" for value in override.sweep_string_iterator()]
    if not lines:
        raise UserError(f"{line} has no values", key=override.key_or_group, remedy="List its values: a,b,c")
    return lines


Value = float | int | str
Params = Mapping[str, Value]
"""The values of a trial by key, without those of inactive dimensions. A choice is its text, as typed."""


@dataclass(frozen=True, slots=True)
class Dimension:
    """What a trial may choose for a key: one of several texts, or a number between two ends."""

    key: str
    """Without a leading `+`."""
    element: str
    """With it: the override is `<element>=<value>`."""
    choices: tuple[str, ...] = ()
    """As typed. Empty: a number."""
    low: float = 0.0
    high: float = 0.0
    """The ends, both included."""
    step: float | None = None
    is_int: bool = False
    is_log: bool = False
    only: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The dimension is active if each of these keys has one of these choices. Otherwise its key is not set."""

    def is_active(self, params: Params) -> bool:
        """Return whether a trial with these values sets the key."""
        return all(params.get(key) in allowed for key, allowed in self.only.items())

    def ends(self) -> tuple[Value, ...]:
        """Return all choices, or the two ends."""
        return self.choices or ((int(self.low), int(self.high)) if self.is_int else (self.low, self.high))


@dataclass(frozen=True, slots=True)
class Space:
    """What a search chooses from, and what all of its jobs have."""

    dimensions: tuple[Dimension, ...]
    """Dimensions on which others depend come first."""
    constants: tuple[str, ...] = ()
    """The overrides that all jobs have."""
    repeats: tuple[str, ...] = ()
    """An override for each job of a trial, with the key over which results are averaged. Empty: a trial is one job."""

    @property
    def swept(self) -> tuple[str, ...]:
        """The keys that differ between jobs."""
        return tuple(dict.fromkeys([*(one.key for one in self.dimensions), *map(key_of, self.repeats)]))

    @property
    def keys(self) -> list[str]:
        """All keys that a job may set."""
        return [*map(key_of, self.constants), *self.swept]

    def lines(self, params: Params, repeat: int = 0) -> tuple[str, ...]:
        """Return the overrides of a job of a trial.

        Args:
            repeat: the number of the job in its trial, from 0.
        """
        chosen = [f"{one.element}={params[one.key]}" for one in self.dimensions if one.key in params]
        return (*self.constants, *chosen, *self.repeats[repeat : repeat + 1])

    def corners(self) -> Iterator[dict[str, Value]]:
        """Yield a trial with each choice and each end of each dimension, the first ones at first.

        The other dimensions have their first value. A condition of the dimension is met.
        """
        given: list[Params] = [{}]
        for one in self.dimensions:
            needed = {key: allowed[0] for key, allowed in one.only.items()}
            given += [{**needed, one.key: value} for value in one.ends()]
        for params in given:
            values: dict[str, Value] = {}
            for one in self.dimensions:
                if one.is_active(values):
                    values[one.key] = params.get(one.key, one.ends()[0])
            yield values

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Space:
        """Return the space that `dataclasses.asdict` and JSON have made into lists and mappings."""

        def dimension(one: Mapping[str, Any]) -> Dimension:
            only = {key: tuple(allowed) for key, allowed in one["only"].items()}
            return Dimension(**{**one, "choices": tuple(one["choices"]), "only": only})

        dimensions = tuple(map(dimension, content["dimensions"]))
        return cls(dimensions, tuple(content["constants"]), tuple(content["repeats"]))

    def masked(self) -> Space:
        """Return the space with secrets masked. Only constants have any."""
        return replace(self, constants=tuple(mask_overrides(self.constants)))


def space_of(overrides: Sequence[Override], average: str) -> Space:
    """Return the space that overrides describe.

    Args:
        overrides: one for each key.
        average: the key over which results are averaged.

    Raises:
        UserError: a key has no values, or several values that are secret.
    """
    dimensions, constants, repeats = list[Dimension](), list[str](), tuple[str, ...]()
    for override in overrides:
        element = override.get_key_element()
        key = element.lstrip("+")
        if isinstance(override.value(), IntervalSweep | RangeSweep) and key != average:
            dimensions.append(_number(key, override))
            continue
        lines = tuple(dict.fromkeys(lines_of(override)))
        if len(lines) == 1:
            constants += lines
        elif mask_overrides(lines) != [*lines]:
            raise UserError("a search over secrets would write them", key=key, remedy="Give one value.")
        elif key == average:
            repeats = lines
        else:
            dimensions.append(Dimension(key, element, tuple(line.partition("=")[2] for line in lines)))
    return Space(tuple(dimensions), tuple(constants), repeats)


def _number(key: str, override: Override) -> Dimension:
    """Return the dimension of `interval(…)` or `range(…)`."""
    value: Any = override.value()
    is_int = isinstance(value.start, int)
    if isinstance(value, IntervalSweep):
        low, high, step = float(value.start or 0), float(value.end or 0), None
    else:
        listed = [float(text) for text in override.sweep_string_iterator()] or [0.0, -1.0]
        low, high, step = min(listed), max(listed), abs(float(value.step))  # in any order: shuffle(range(…))
        is_int = is_int and isinstance(value.step, int)
    return Dimension(key, override.get_key_element(), (), low, high, step, is_int, "log" in value.tags)
