"""Schedule: a function of the step, when it acts, and the numbers in the parameter groups that it sets."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from hydraloop.errors import UserError
from hydraloop.optim.group_numbers import GroupNumber, numbers_to_change
from hydraloop.optim.plateau import Plateau
from hydraloop.optim.schedule_functions import CycledMomentum, Function, OneCycle

log = logging.getLogger(__name__)


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
        UserError: the groups have no `param`, or the function has no `value` of its own.
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
        kind = type(function)
        if kind.value is Function.value and kind.scale is Function.scale:
            raise UserError(
                f"{kind.__name__} has no method value",
                key=f"{self.key}._target_",
                remedy="Write: def value(self, k, length, value, initial)",
            )
        self.function = function
        self.by_epoch = by_epoch
        self.begin = begin
        self.end = end
        self.monitor = monitor
        self.order = begin * steps_per_epoch if by_epoch else begin
        self._functions = _functions(function, optimizer, param, self.key)

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
        for number, function in self._functions.items():
            initial = number.initial()
            values[number] = function.value(k, length, values.get(number, initial), initial)

    def step(self) -> None:
        """Do nothing: the value depends only on the counts."""

    def observe(self, metrics: Mapping[str, float], optimizer_step: int, epoch: int) -> None:
        """Let a `Plateau` count a validation. The others ignore it."""
        n = epoch if self.by_epoch else optimizer_step
        if isinstance(self.function, Plateau) and self.monitor is not None and self.begin <= n < self.end:
            self.function.observe(float(metrics[self.monitor]))

    @property
    def mode(self) -> str | None:
        """`min` or `max` of a `Plateau`; None: not known yet."""
        return self.function.mode if isinstance(self.function, Plateau) else None

    @mode.setter
    def mode(self, mode: str) -> None:
        if isinstance(self.function, Plateau):
            self.function.mode = mode

    def state_dict(self) -> dict[str, Any]:
        """Return its begin and end, so that a resumed run can report a change, and the counts of a `Plateau`."""
        state: dict[str, Any] = {"begin": self.begin, "end": self.end}
        return {**state, **self.function.state_dict()} if isinstance(self.function, Plateau) else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue the counts of a `Plateau`. For other schedules, warn if their begin or end has changed.

        Raises:
            UserError: it is the state of another kind of schedule.
        """
        if self.state_dict().keys() - state.keys():
            raise another_kind(self.key)
        if isinstance(self.function, Plateau):
            self.function.load_state_dict({name: state[name] for name in self.function.state_dict()})
        elif (state["begin"], state["end"]) != (self.begin, self.end):
            log.warning(
                "%s acts from %d to %d; before the run was resumed, it acted from %d to %d",
                self.key, self.begin, self.end, state["begin"], state["end"],
            )  # fmt: skip


def another_kind(key: str) -> UserError:
    """Return the error for a state that the schedule of this key cannot load."""
    return UserError(
        "the checkpoint has the state of another kind of schedule",
        key=key,
        remedy="Use the schedule of the checkpoint, continue without schedules (resume_strict=false scheduler=[]), or "
        "start a new run with its weights (load_from=…).",
    )


def _functions(function: Function, optimizer: Optimizer, param: str, key: str) -> dict[GroupNumber, Function]:
    """Return each number to change, with its function. A `OneCycle` changes the momentum too."""
    numbers = numbers_to_change(optimizer, param, f"{key}.param")
    if not isinstance(function, OneCycle):
        return dict.fromkeys(numbers, function)
    tops = function.max_lr if isinstance(function.max_lr, list | tuple) else [function.max_lr] * len(numbers)
    if len(tops) != len(numbers):
        raise UserError(
            f"there are {len(tops)} values for {len(numbers)} parameter groups",
            key=f"{key}.max_lr",
            remedy="Give one for each group.",
        )
    found: dict[GroupNumber, Function] = {
        number: dataclasses.replace(function, max_lr=top) for number, top in zip(numbers, tops, strict=True)
    }
    if function.cycle_momentum and param == "lr":
        cycled = f"{key}.cycle_momentum"
        try:
            found |= dict.fromkeys(numbers_to_change(optimizer, "momentum", cycled), CycledMomentum(function))
        except UserError as error:
            raise UserError(error.problem, key=cycled, remedy=f"Set {cycled}=false.") from None
    return found
