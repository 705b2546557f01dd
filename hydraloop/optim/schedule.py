"""Schedule: a function of the step, what it sets, and when it acts."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from hydraloop.errors import UserError
from hydraloop.optim.functions import CycledMomentum, Function, OneCycle
from hydraloop.optim.places import Place, places
from hydraloop.optim.plateau import Plateau

log = logging.getLogger(__name__)


class Schedule:
    """One entry of `scheduler`.

    After n optimizer steps (or epochs, with `by_epoch`) it acts if begin <= n < end, as in MMEngine, and its function
    gets k = n - begin. From `end` on the last value stays. The `param_scheduler` hook applies the schedules in the
    order of `begin`, then of the config, at each step from what the optimizer was given.

    Args:
        name: its key in the config.
        function: of the step.
        optimizer: whose groups it changes.
        param: which number of the groups: `lr`; `momentum` (the first of the betas where there are betas); `betas`, all
            of them, or one, `betas.0`; `weight_decay` or any other.
        by_epoch: count epochs; False: optimizer steps.
        begin: the first n at which it acts.
        end: the n at which it ends.
        monitor: the validation metric that a `Plateau` follows; None for the others.
        steps_per_epoch: optimizer steps of an epoch, to compare a `begin` in epochs with one in steps.

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
        self.name = name
        self.key = f"scheduler.{name}"
        self.function = function
        self.by_epoch = by_epoch
        self.begin = begin
        self.end = end
        self.monitor = monitor
        self.order = begin * steps_per_epoch if by_epoch else begin
        self._targets = _targets(function, optimizer, param, self.key)
        self._optimizer = optimizer

    def apply(self, values: dict[Place, float], optimizer_step: int, epoch: int) -> None:
        """Change the values of this step: what the schedules before this one make of the initial ones. No host sync.

        Args:
            values: by place; those that no schedule has set are not there.
            optimizer_step: those done.
            epoch: those done.
        """
        n = epoch if self.by_epoch else optimizer_step
        if n < self.begin:
            return
        k, length = min(n, self.end - 1) - self.begin, self.end - self.begin
        for place, function in self._targets:
            initial = place.initial(self._optimizer)
            values[place] = function.value(k, length, values.get(place, initial), initial)

    def initial_values(self) -> list[float]:
        """Return what the optimizer was given for the numbers that it sets."""
        return [place.initial(self._optimizer) for place, _ in self._targets]

    def step(self) -> None:
        """Nothing: the value depends on the counts alone."""

    def observe(self, metrics: Mapping[str, float], optimizer_step: int, epoch: int) -> None:
        """Let a `Plateau` count a validation."""
        n = epoch if self.by_epoch else optimizer_step
        if isinstance(self.function, Plateau) and self.monitor is not None and self.begin <= n < self.end:
            self.function.observe(float(metrics[self.monitor]))

    @property
    def mode(self) -> str | None:
        """`min` or `max`, of a `Plateau`; None: not known yet."""
        return self.function.mode if isinstance(self.function, Plateau) else None

    @mode.setter
    def mode(self, mode: str) -> None:
        if isinstance(self.function, Plateau):
            self.function.mode = mode

    def sets(self, name: str) -> bool:
        """Return whether it sets this entry of the groups (`lr`) to numbers of the config, not of the optimizer."""
        return any(
            place.name == name
            and place.entry is None
            and (
                isinstance(function, CycledMomentum) or (isinstance(function, OneCycle) and function.max_lr is not None)
            )
            for place, function in self._targets
        )

    def state_dict(self) -> dict[str, Any]:
        """Return when it acts, to report a change, and the counts of a `Plateau`."""
        state: dict[str, Any] = {"begin": self.begin, "end": self.end}
        return {**state, **self.function.state_dict()} if isinstance(self.function, Plateau) else state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned, of a run of any length.

        Raises:
            UserError: it is from an earlier version, which had other values.
        """
        if "end" not in state:
            raise UserError(
                "the checkpoint has its state from an earlier version of hydraloop",
                key=self.key,
                remedy="Set resume_strict=false and scheduler=[], or start a new run with load_from=….",
            )
        if isinstance(self.function, Plateau):
            self.function.load_state_dict({name: state[name] for name in self.function.state_dict()})
        elif (state["begin"], state["end"]) != (self.begin, self.end):
            log.warning(
                "%s acts from %d to %d; in the run that is resumed it was from %d to %d",
                self.key, self.begin, self.end, state["begin"], state["end"],
            )  # fmt: skip


def _targets(function: Function, optimizer: Optimizer, param: str, key: str) -> list[tuple[Place, Function]]:
    """Each number that is set, with its function: a `OneCycle` may have one for each, and one for the momentum."""
    where = places(optimizer, param, f"{key}.param")
    if not isinstance(function, OneCycle):
        return [(place, function) for place in where]
    tops = function.max_lr if isinstance(function.max_lr, list | tuple) else [function.max_lr] * len(where)
    if len(tops) != len(where):
        raise UserError(
            f"{len(tops)} values for {len(where)} parameter groups", key=f"{key}.max_lr", remedy="Give one for each."
        )
    targets: list[tuple[Place, Function]] = [
        (place, dataclasses.replace(function, max_lr=top)) for place, top in zip(where, tops, strict=True)
    ]
    if function.cycle_momentum and param == "lr":
        cycled = f"{key}.cycle_momentum"
        try:
            targets += [(place, CycledMomentum(function)) for place in places(optimizer, "momentum", cycled)]
        except UserError as error:
            raise UserError(error.problem, key=cycled, remedy=f"Set {cycled}=false.") from None
    return targets
