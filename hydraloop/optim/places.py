"""Where a schedule writes: a number in the optimizer's parameter groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from hydraloop.errors import UserError, close_names

_NOT_SCHEDULED = frozenset({"params", "max_lr", "min_lr", "max_momentum", "base_momentum"})
"""The parameters, and what torch's schedulers note in the groups."""


class Place(NamedTuple):
    """A number of a parameter group, or one entry of a tuple of numbers."""

    group: int
    name: str
    entry: int | None

    @property
    def initial_name(self) -> str:
        """The group's key of the value that the optimizer was given, as torch has `initial_lr`; checkpoints have it."""
        return f"initial_{self.name}" if self.entry is None else f"initial_{self.name}.{self.entry}"

    def initial(self, optimizer: Optimizer) -> float:
        """Return what the optimizer was given. Noted at the first call; no host sync later."""
        group = optimizer.param_groups[self.group]  # not kept: loading a state replaces the groups
        value = group.get(self.initial_name)
        if not isinstance(value, int | float):
            group[self.initial_name] = value = float(self._read(group) if value is None else value)
        return value

    def write(self, optimizer: Optimizer, value: float) -> None:
        """Set the number; a tensor is filled. No host sync."""
        group = optimizer.param_groups[self.group]
        number, whole = self._read(group), group[self.name]
        if isinstance(number, Tensor):
            number.fill_(value)
        elif self.entry is None:
            group[self.name] = value
        else:
            group[self.name] = type(whole)((*whole[: self.entry], value, *whole[self.entry + 1 :]))

    def _read(self, group: Mapping[str, Any]) -> Any:
        return group[self.name] if self.entry is None else group[self.name][self.entry]


def places(optimizer: Optimizer, param: str, key: str) -> list[Place]:
    """Return the numbers that a schedule with this `param` sets.

    Args:
        optimizer: in whose groups they are.
        param: a key of the groups (all entries, where it has several: `betas`), one entry (`betas.0`), or `momentum`,
            which is the first of the betas where there are betas.
        key: the option's key in the config, for the error.

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


def _in_group(group: Mapping[str, Any], param: str) -> list[tuple[str, int | None]]:
    """(key, entry) of each number."""
    if param == "momentum" and "momentum" not in group:
        param = "betas.0"
    if param not in _known(group):
        return []
    name, _, index = param.rpartition(".")
    if name in group:
        return [(name, int(index))]
    value = group[param]
    return [(param, number) for number in range(len(value))] if isinstance(value, tuple | list) else [(param, None)]


def _known(group: Mapping[str, Any]) -> set[str]:
    """What a schedule can set: numbers, without flags and without the notes of schedules."""
    known: set[str] = set()
    for name, value in group.items():
        if name in _NOT_SCHEDULED or name.startswith("initial_"):
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
