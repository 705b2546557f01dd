"""Any key of the parameter groups as if it were the lr: what lets each scheduler change momentum, betas, weight decay.

A scheduler of torch reads and writes `group["lr"]` and nothing else. So it gets an optimizer whose groups are the
values of another key, one group for each value; before a step they are copied in, and out after it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from hydraloop.errors import UserError, close_names

_SCHEDULERS_OWN = frozenset({"params", "max_lr", "min_lr", "max_momentum", "base_momentum"})
"""Entries of a group that are no value of the optimizer: OneCycleLR's notes, and the parameters."""


class Place(NamedTuple):
    """Where a value is: a number of a group, or one of a tuple of them."""

    group: int
    name: str
    entry: int | None

    @property
    def initial(self) -> str:
        """The group's key for what the schedules of this value begin with, as torch has `initial_lr`.

        It lies in the group so that a checkpoint has it: a schedule that begins after a resume needs it.
        """
        return f"initial_{self.name}" if self.entry is None else f"initial_{self.name}.{self.entry}"


def places(optimizer: Optimizer, param: str, key: str) -> list[Place]:
    """The values that a schedule with this `param` changes.

    Args:
        optimizer: in whose groups they are.
        param: a key of the groups (all entries, where it has several: `betas`), one entry (`betas.0`), or `momentum`,
            which is the first of the betas where there are betas.
        key: the option's place in the config, for the error.

    Raises:
        UserError: no group has it; names those there are.
    """
    found = [
        Place(number, name, entry)
        for number, group in enumerate(optimizer.param_groups)
        for name, entry in _in_group(group, param)
    ]
    if not found:
        known = sorted({name for group in optimizer.param_groups for name in _known(group)})
        close = close_names(param, known)
        raise UserError(
            f"{type(optimizer).__name__} has no {param!r} in its parameter groups",
            key=key,
            remedy=f"{f'Did you mean {close[0]}? ' if close else ''}There are {', '.join(known)}.",
        )
    return found


def read(optimizer: Optimizer, place: Place) -> Any:
    """The value: a number, or a tensor with one."""
    value = optimizer.param_groups[place.group][place.name]
    return value if place.entry is None else value[place.entry]


def write(optimizer: Optimizer, place: Place, value: Any) -> None:
    """Set the value; a tuple is made anew."""
    group = optimizer.param_groups[place.group]  # looked up each time: loading a state replaces the groups
    if place.entry is None:
        group[place.name] = value
    else:
        old = group[place.name]
        group[place.name] = type(old)((*old[: place.entry], value, *old[place.entry + 1 :]))


class Shadow(Optimizer):
    """An optimizer that trains nothing, with the values of `where` as the lr of its groups."""

    def __init__(self, optimizer: Optimizer, where: list[Place]) -> None:
        self._optimizer = optimizer
        self._where = where
        groups = []
        for place in where:
            value = read(optimizer, place)
            kept = value.clone() if isinstance(value, Tensor) else value
            initial = optimizer.param_groups[place.group].setdefault(place.initial, kept)
            groups.append({"params": [nn.Parameter(torch.empty(0))], "lr": value, "initial_lr": initial})
        super().__init__(groups, {})
        self._opt_called = True
        """What a scheduler looks at before it warns that the optimizer was not stepped."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # there is no loss
        """Nothing; schedulers wrap it."""

    def pull(self) -> None:
        """Take the values from the optimizer."""
        for group, place in zip(self.param_groups, self._where, strict=True):
            group["lr"] = read(self._optimizer, place)

    def push(self) -> None:
        """Give them back."""
        for group, place in zip(self.param_groups, self._where, strict=True):
            write(self._optimizer, place, group["lr"])


def _in_group(group: Mapping[str, Any], param: str) -> list[tuple[str, int | None]]:
    """(key, entry) of each value."""
    if param == "momentum" and "momentum" not in group:
        param = "betas.0"
    known = _known(group)
    if param not in known:
        return []
    name, _, index = param.rpartition(".")
    if name in known and name in group:
        return [(name, int(index))]
    value = group[param]
    return [(param, number) for number in range(len(value))] if isinstance(value, tuple | list) else [(param, None)]


def _known(group: Mapping[str, Any]) -> set[str]:
    """What a schedule can change; not what schedulers have put there, nor yes and no."""
    known: set[str] = set()
    for name, value in group.items():
        if name in _SCHEDULERS_OWN or name.startswith("initial_"):
            continue
        if _is_number(value):
            known.add(name)
        elif isinstance(value, tuple | list) and value and all(map(_is_number, value)):
            known |= {name, *(f"{name}.{index}" for index in range(len(value)))}
    if "betas" in known:
        known.add("momentum")
    return known


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)
