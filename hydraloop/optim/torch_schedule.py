"""A scheduler of torch or of another package, such as transformers, as the one schedule of a run."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from hydraloop.errors import UserError
from hydraloop.optim.places import Place

_LENGTHS = ("T_max", "total_iters", "total_steps")
"""Arguments of torch's schedulers that mean the whole length."""
_INSTEAD = "use an option of the group scheduler, which can change: scheduler=cosine, poly, onecycle, …"


class TorchSchedule:
    """A scheduler that changes the lr when it is stepped. It cannot be combined with other schedules.

    Args:
        name: its key in the config.
        factory: makes the scheduler, given the optimizer.
        optimizer: whose lr it changes.
        by_epoch: step after each epoch; False: after each optimizer step.
        monitor: the validation metric with which it is stepped instead (`ReduceLROnPlateau`).
        length: of the run; a `T_max`, `total_iters` or `total_steps` that is null, or required and missing, becomes it.

    Raises:
        UserError: the target refuses its arguments.
    """

    order = 0

    def __init__(
        self,
        name: str,
        factory: functools.partial[Any],
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
        parameters = inspect.signature(factory).parameters
        open_ = {key for key in _LENGTHS if key in parameters and parameters[key].default is inspect.Parameter.empty}
        open_ |= {key for key in _LENGTHS if key in factory.keywords and factory.keywords[key] is None}
        try:
            self.scheduler: Any = factory(optimizer, **dict.fromkeys(open_, length))
        except (TypeError, ValueError, ArithmeticError) as error:
            raise UserError(str(error), key=self.key, remedy="Check its arguments.") from error

    @property
    def mode(self) -> str | None:
        """`min` or `max`, of a `ReduceLROnPlateau`."""
        return getattr(self.scheduler, "mode", None)

    def apply(self, values: dict[Place, float], optimizer_step: int, epoch: int) -> None:
        """Nothing: `step` changes the groups."""

    def step(self) -> None:
        """Step the scheduler."""
        self.scheduler.step()

    def observe(self, metrics: Mapping[str, float], optimizer_step: int, epoch: int) -> None:
        """Step the scheduler with its metric."""
        self.scheduler.step(metrics[str(self.monitor)])

    def sets(self, name: str) -> bool:
        """Return whether it sets this entry of the parameter groups (`lr`) to numbers of the config."""
        return name == "lr" and isinstance(self.scheduler, OneCycleLR | CyclicLR)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's state: numbers, strings, lists."""
        return {"scheduler": self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned. An lr that was typed for the resumed run scales.

        Raises:
            UserError: this run has another length, or what becomes of a typed lr is not known.
        """
        saved = state["scheduler"]
        for name in _LENGTHS:
            if name in saved and saved[name] != getattr(self.scheduler, name):
                raise UserError(
                    f"the checkpoint has {name}={saved[name]}, this run {getattr(self.scheduler, name)}",
                    key=self.key,
                    remedy=f"Set {self.key}.{name}={saved[name]}, or {_INSTEAD}",
                )
        groups = self._optimizer.param_groups
        bases = [group.get("initial_lr") for group in groups]
        self.scheduler.load_state_dict(saved)
        old = saved.get("base_lrs", bases)
        if self.sets("lr"):
            bases = old
        if bases != old:
            if getattr(self.scheduler, "eta_min", None):
                raise UserError(
                    f"{type(self.scheduler).__name__} in {self.key} has an eta_min, and what it makes of another lr is "
                    "not known",
                    key="optimizer.lr",
                    remedy=f"Leave it out, or {_INSTEAD}",
                )
            self.scheduler.base_lrs = bases
        for number, (base, was, value) in enumerate(zip(bases, old, saved["_last_lr"], strict=True)):
            scaled = value * (base / was) if base != was and was else value
            Place(number, "lr", None).write(self._optimizer, scaled)
