"""A scheduler of torch or another package, such as transformers, as the only schedule of its optimizer."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR, ReduceLROnPlateau

from hydraloop.errors import UserError
from hydraloop.optim.schedule import GroupNumber, another_kind

_TOTALS = ("T_max", "total_iters", "total_steps")
"""Arguments of torch's schedulers that mean the whole length."""


class TorchSchedule:
    """A scheduler that changes the lr when it is stepped. It is the only schedule of its optimizer.

    Args:
        name: its key in the config.
        factory: a partial that makes the scheduler, given the optimizer.
        optimizer: its lr is changed.
        by_epoch: step after each epoch; False: after each optimizer step.
        monitor: the validation metric for the step of a `ReduceLROnPlateau`, after each validation.
        length: of the run; replaces a `T_max`, `total_iters` or `total_steps` that is null, or required and missing.

    Raises:
        UserError: it is not a partial, the target refuses its arguments, or a metric is missing or not used.
    """

    order = 0

    def __init__(
        self,
        name: str,
        factory: Any,
        optimizer: Optimizer,
        *,
        by_epoch: bool = False,
        monitor: str | None = None,
        length: int = 1,
    ) -> None:
        self.key = f"scheduler.{name}"
        self.by_epoch = by_epoch
        self.monitor = monitor
        self._optimizer = optimizer
        if not isinstance(factory, functools.partial):
            raise UserError(
                "is not a schedule", key=self.key, remedy="For a scheduler of torch or another package: _partial_=true."
            )
        parameters, keywords = inspect.signature(factory).parameters, factory.keywords
        required = {key for key in _TOTALS if key in parameters and parameters[key].default is inspect.Parameter.empty}
        null = {key for key in _TOTALS if key in keywords and keywords[key] is None}
        try:
            self.scheduler: Any = factory(optimizer, **dict.fromkeys(required | null, length))
        except (TypeError, ValueError, ArithmeticError) as error:
            raise UserError(str(error), key=self.key, remedy=f"Give it the argument: +{self.key}.NAME=…") from error
        check_monitor(monitor, self.key, follows=isinstance(self.scheduler, ReduceLROnPlateau))

    @property
    def mode(self) -> str | None:
        """`min` or `max` of a `ReduceLROnPlateau`."""
        return getattr(self.scheduler, "mode", None)

    def apply(self, values: dict[GroupNumber, float], optimizer_step: int, epoch: int) -> None:
        """Do nothing: `step` changes the groups."""

    def step(self) -> None:
        """Step the scheduler."""
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # with `every`, it may step later; torch warns
        self.scheduler.step()

    def observe(self, metrics: Mapping[str, float], optimizer_step: int, epoch: int) -> None:
        """Step the scheduler with its metric."""
        self.scheduler.step(metrics[str(self.monitor)])

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's class and state, and the numbers of each group that it changes."""
        numbers = ("lr", "momentum", "betas") if getattr(self.scheduler, "cycle_momentum", False) else ("lr",)
        groups = [
            {name: float(group[name]) if name == "lr" else group[name] for name in numbers if name in group}
            for group in self._optimizer.param_groups
        ]
        return {"class": type(self.scheduler).__name__, "scheduler": self.scheduler.state_dict(), "groups": groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned.

        Raises:
            UserError: it is the state of another kind of schedule, or this run has another length or lr.
        """
        kind = type(self.scheduler).__name__
        if state.keys() != {"class", "scheduler", "groups"} or state["class"] != kind:
            raise another_kind(self.key)
        saved = state["scheduler"]
        here: dict[str, Any] = {name: getattr(self.scheduler, name, None) for name in _TOTALS}
        if not isinstance(self.scheduler, OneCycleLR | CyclicLR):  # their lrs are their own options
            here["base_lrs"] = [group.get("initial_lr") for group in self._optimizer.param_groups]
        for name, value in here.items():
            if name in saved and saved[name] != value:
                raise UserError(
                    f"the checkpoint has {name}={saved[name]}, this run {value}; torch's schedulers cannot change it",
                    key=self.key,
                    remedy="Use the value of the checkpoint, or an option of the group scheduler: scheduler=cosine, …",
                )
        self.scheduler.load_state_dict(saved)
        for index, numbers in enumerate(state["groups"]):  # the optimizer may have no state, or numbers that were typed
            for name, value in numbers.items():
                GroupNumber(self._optimizer, index, name, None).write(value)


def check_monitor(monitor: str | None, key: str, *, follows: bool) -> None:
    """Refuse a metric for a schedule that does not follow one, and no metric for one that `follows` it."""
    if follows != (monitor is not None):
        problem, remedy = "this schedule does not follow a metric", "Leave it out."
        if follows:
            problem, remedy = "a plateau needs a metric", f"Set {key}.monitor=loss for the validation loss."
        raise UserError(problem, key=f"{key}.monitor", remedy=remedy)
