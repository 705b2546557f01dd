"""Axes: the values that a sweep gives to keys, and the jobs that are their product."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, product

from hydra.core.override_parser.types import Override

from hydraloop.config import arguments
from hydraloop.errors import UserError

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
    if not arguments.is_sweep(override):
        is_number = isinstance(override.value(), bool | int | float)
        return [f"{key}={override.get_value_element_as_str()}" if is_number else line]  # 1e-3 is 0.001, as in a sweep
    if not override.is_discrete_sweep():
        raise UserError(f"{line} has no end", key=override.key_or_group, remedy=_LIST)
    lines = [f"{key}={value}" for value in override.sweep_string_iterator()]
    if not lines:
        raise UserError(f"{line} has no values", key=override.key_or_group, remedy="List its values: a,b,c")
    return lines
