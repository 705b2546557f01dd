"""Schedules of one key: they multiply, and where one has led to 0 the product does not say what the others did.

A longer run that goes on from there needs it, so it is made anew from the factor of each.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.optim import Optimizer

from hydraloop.optim.shadow import Place, read, write

if TYPE_CHECKING:
    from hydraloop.optim.schedule import Schedule

log = logging.getLogger(__name__)


def introduce(schedules: Iterable[Schedule]) -> None:
    """Let the schedules of one optimizer know each other."""
    all_of_them = tuple(schedules)
    for schedule in all_of_them:
        schedule.beside = all_of_them


@contextmanager
def counted(optimizer: Optimizer, where: Sequence[Place], product: list[float]) -> Iterator[None]:
    """Multiply `product` by what happens to the values inside; a 0 is, inside, what the schedules began with.

    A host sync where a value is a tensor on a device: it is for the few steps that follow a validation.
    """
    zeros: list[tuple[Place, Any]] = []
    before: list[float] = []
    for place in where:
        value = read(optimizer, place)
        value = value.clone() if isinstance(value, Tensor) else value
        first = optimizer.param_groups[place.group].get(place.initial, 0.0)
        if float(value) == 0 and float(first) != 0:
            zeros.append((place, value))
            _set(optimizer, place, float(first) * product[len(before)])
        before.append(float(read(optimizer, place)))
    yield
    for number, place in enumerate(where):
        if before[number]:
            product[number] *= float(read(optimizer, place)) / before[number]
    for place, value in zeros:
        _set(optimizer, place, value)


def rebuild(loaded: Schedule, values: Sequence[Any]) -> None:
    """The values that were 0, as the product of all factors, where a schedule has another length now.

    Called after each schedule has loaded its state; the last of those that share a value has all factors.

    Args:
        loaded: which has.
        values: what its state says that they were.
    """
    unknown: set[str] = set()
    for place, was in zip(loaded.where, values, strict=False):
        there = [schedule for schedule in loaded.beside if place in schedule.where]
        if float(was) != 0 or len(there) < 2 or not any(schedule.moved for schedule in there):
            continue
        value = float(loaded.optimizer.param_groups[place.group][place.initial])
        for schedule in there:
            factors = schedule.factors()
            if factors is None:
                unknown.add(schedule.key)
            else:
                value *= factors[place]
        _set(loaded.optimizer, place, value)
        names = ", ".join(schedule.key for schedule in there)
        log.info("%s was 0; as the product of %s it is %.6g", place.name, names, value)
    if unknown:
        log.warning("%s: a value was 0, and what %s had made of it is not known and left out",
                    loaded.key, ", ".join(sorted(unknown)))  # fmt: skip


def _set(optimizer: Optimizer, place: Place, value: Any) -> None:
    """Set a value, in place where it is a tensor of its own."""
    old = read(optimizer, place)
    if isinstance(old, Tensor):
        old.fill_(value)
    else:
        write(optimizer, place, value)
