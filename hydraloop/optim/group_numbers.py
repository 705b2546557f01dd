"""The numbers in the parameter groups of an optimizer that schedules change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from hydraloop.engine.optimizers.optimizer_set import parts
from hydraloop.errors import UserError, any_of, close_names

_NOT_SCHEDULED = frozenset({"params", "max_lr", "min_lr", "max_momentum", "base_momentum"})
"""The parameters, and what torch's schedulers store in the groups."""


class GroupNumber(NamedTuple):
    """A number in a parameter group, or one entry of a tuple of numbers."""

    optimizer: Optimizer
    group: int
    name: str
    entry: int | None

    def initial(self) -> float:
        """Return the value of the optimizer's config.

        The first call stores it in the group, for checkpoints, under torch's name (`initial_lr`). Later calls need no
        host sync.
        """
        group = self.optimizer.param_groups[self.group]  # loading a state replaces the groups
        key = f"initial_{self.name}" if self.entry is None else f"initial_{self.name}.{self.entry}"
        value = group.get(key)
        if not isinstance(value, int | float):
            group[key] = value = float(self._read(group) if value is None else value)
        return value

    def write(self, value: float) -> None:
        """Set the number. A tensor is filled. No host sync."""
        group = self.optimizer.param_groups[self.group]
        number, whole = self._read(group), group[self.name]
        if isinstance(number, Tensor):
            number.fill_(value)
        elif self.entry is None:
            group[self.name] = value
        else:
            group[self.name] = type(whole)((*whole[: self.entry], value, *whole[self.entry + 1 :]))

    def _read(self, group: Mapping[str, Any]) -> Any:
        return group[self.name] if self.entry is None else group[self.name][self.entry]


def numbers_to_change(optimizer: Optimizer, param: str, key: str) -> list[GroupNumber]:
    """Return the numbers that a schedule with this `param` changes.

    Args:
        optimizer: its parameter groups are searched; with several optimizers, those of all. Groups may have different
            keys (AdamW beside SGD): those without the `param` stay as they are.
        param: a key of the groups (all entries of a tuple: `betas`), one entry (`betas.0`), or `momentum`, which is
            the first of the betas if there are betas.
        key: the option's key in the config, for the error.

    Raises:
        UserError: no group has it.
    """
    found: list[GroupNumber] = []
    known: set[str] = set()
    optimizers = parts(optimizer).values()
    for one in optimizers:
        for number, group in enumerate(one.param_groups):
            numbers = _numbers(group)
            known |= numbers.keys()
            found += [GroupNumber(one, number, *where) for where in numbers.get(param, [])]
    if not found:
        close = close_names(param, sorted(known))
        raise UserError(
            f"{any_of([type(one).__name__ for one in optimizers])} has no {param!r} in its parameter groups",
            key=key,
            remedy=f"{f'Did you mean {close[0]}? ' if close else ''}Use {', '.join(sorted(known))}.",
        )
    return found


def _numbers(group: Mapping[str, Any]) -> dict[str, list[tuple[str, int | None]]]:
    """Return {param: (key, entry) of each number} for everything in a group that a schedule can change."""
    found: dict[str, list[tuple[str, int | None]]] = {}
    for name, value in group.items():
        if name in _NOT_SCHEDULED or name.startswith("initial_"):
            continue
        if _is_number(value):
            found[name] = [(name, None)]
        elif isinstance(value, tuple | list) and value and all(map(_is_number, value)):
            found[name] = [(name, entry) for entry in range(len(value))]
            found |= {f"{name}.{entry}": [(name, entry)] for entry in range(len(value))}
    if "betas.0" in found:  # some optimizers have one number
        found.setdefault("momentum", found["betas.0"])
    return found


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1
    return isinstance(value, int | float) and not isinstance(value, bool)
