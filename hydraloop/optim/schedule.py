"""Schedule: a function of the step, when it acts, and the numbers in the parameter groups that it sets."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor
from torch.optim import Optimizer

from hydraloop.engine.named_optimizers import parts
from hydraloop.errors import UserError, any_of, suggestion
from hydraloop.optim.schedule_functions import Function

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


class Schedule:
    """One entry of `scheduler`.

    After n optimizer steps (or epochs, with `by_epoch`) it acts if begin <= n < end, as in MMEngine. Its function gets
    k = n - begin. From `end` on, the last value stays. At each step, the hook `param_scheduler` applies the schedules
    to the values of the optimizer's config, in the order of `begin`, then in the order of the config.

    Args:
        name: its key in the config.
        function: the function of the step.
        optimizer: its parameter groups are changed; with several optimizers, those of all.
        param: the number of the groups that it changes: `lr`, `weight_decay` or another; `momentum` (the first of the
            betas if there are betas); `betas` (all of them) or `betas.0`.
        by_epoch: count epochs; False: optimizer steps.
        begin: the first n at which it acts.
        end: the n at which it ends.
        monitor: the validation metric that a `Plateau` follows; None for the others.
        steps_per_epoch: optimizer steps in an epoch, to compare a `begin` in epochs with one in steps.

    Raises:
        UserError: the groups have no `param`.
    """

    def __init__(
        self,
        name: str,
        function: Function,
        optimizer: Optimizer,
        *,
        param: str = "lr",
        by_epoch: bool = False,
        begin: int = 0,
        end: int = sys.maxsize,
        monitor: str | None = None,
        steps_per_epoch: int = 1,
    ) -> None:
        self.key = f"scheduler.{name}"
        self.function = function
        self.by_epoch = by_epoch
        self.begin = begin
        self.end = end
        self.monitor = monitor
        self.order = begin * steps_per_epoch if by_epoch else begin
        self._numbers = numbers_to_change(optimizer, param, f"{self.key}.param")

    def apply(self, values: dict[GroupNumber, float], optimizer_step: int, epoch: int) -> None:
        """Change the values of this step. No host sync.

        Args:
            values: the results of the schedules before this one; without a number that none of them has changed.
            optimizer_step: number of completed optimizer steps.
            epoch: number of completed epochs.
        """
        n = epoch if self.by_epoch else optimizer_step
        if n < self.begin:
            return
        k, length = min(n, self.end - 1) - self.begin, self.end - self.begin
        for number in self._numbers:
            initial = number.initial()
            values[number] = self.function.value(k, length, values.get(number, initial), initial)

    def step(self) -> None:
        """Do nothing: the value depends only on the counts."""

    def observe(self, metrics: Mapping[str, float], optimizer_step: int, epoch: int) -> None:
        """Let a `Plateau` count a validation. The others ignore it."""
        n = epoch if self.by_epoch else optimizer_step
        if self.monitor is not None and self.begin <= n < self.end:
            self.function.observe(float(metrics[self.monitor]))

    @property
    def mode(self) -> str | None:
        """`min` or `max` of a `Plateau`; None: not known yet."""
        return self.function.mode

    @mode.setter
    def mode(self, mode: str) -> None:
        self.function.mode = mode

    def state_dict(self) -> dict[str, Any]:
        """Return the counts of a `Plateau`; nothing for others, whose values depend only on the counts of the run."""
        return self.function.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the counts of a `Plateau`.

        Raises:
            UserError: it is the state of another kind of schedule.
        """
        own = self.function.state_dict()
        if own and own.keys() != state.keys():
            raise another_kind(self.key)
        if own:
            self.function.load_state_dict(state)


def another_kind(key: str) -> UserError:
    """Return the error for a state that the schedule of this key cannot load."""
    return UserError(
        "the checkpoint has the state of another kind of schedule",
        key=key,
        remedy="Use the schedule of the checkpoint, continue without schedules (resume_strict=false scheduler=[]), or "
        "start a new run with its weights (load_from=…).",
    )


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
        raise UserError(
            f"{any_of([type(one).__name__ for one in optimizers])} has no {param!r} in its parameter groups",
            key=key,
            remedy=suggestion(param, sorted(known)),
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
