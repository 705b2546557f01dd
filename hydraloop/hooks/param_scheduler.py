"""ParamSchedulerHook: applies the schedules of the learning rate and other values."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, cast

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Priority
from hydraloop.hooks.monitoring import check_metric, check_validated, unknown_direction

if TYPE_CHECKING:
    from hydraloop.optim.schedule import GroupNumber, Schedule
    from hydraloop.optim.torch_schedule import TorchSchedule

log = logging.getLogger(__name__)


class ParamSchedulerHook(Hook):
    """Applies the schedules of the run to numbers of the parameter groups: lr, momentum, weight decay and others.

    Several schedules of one number are applied in the order of `begin`, then of the config. At each step, they start
    from the value with which the optimizer was constructed.

    Priority LOW, MMEngine's: after the logger, whose record has the lr that the iteration used, and before
    `checkpoint`. No host sync in an iteration. No state: the engine saves the schedules. No options, as in MMEngine.
    """

    priority = Priority.LOW

    def __init__(self) -> None:
        self._schedules: list[Schedule | TorchSchedule] = []
        self._monitored: list[tuple[str, Schedule | TorchSchedule]] = []
        """The schedules that follow a metric, with its name."""
        self._written: dict[GroupNumber, float] = {}
        """The values of the previous step."""
        self._group: dict[str, Any] = {}
        """The first parameter group, for the summary, while training runs."""
        self._first_lr = 0.0
        self._summary: str | None = None

    def before_run(self, engine: Engine) -> None:
        """Order the schedules; determine the direction of monitored metrics.

        Raises:
            UserError: no validation reports a monitored metric, or its direction is not known.
        """
        self._summary = None
        engine.messages.provide("lr_summary", lambda: self._summary)
        self._schedules = sorted(engine.run.schedules.values(), key=lambda schedule: schedule.order)
        self._monitored = [(schedule.monitor, schedule) for schedule in self._schedules if schedule.monitor is not None]
        for monitor, schedule in self._monitored:
            check_metric(monitor, engine, key=f"{schedule.key}.monitor")
            _set_mode(schedule, monitor, engine.validations.direction(monitor))

    def before_train(self, engine: Engine) -> None:
        """Begin the summary of the lr."""
        for _, schedule in self._monitored:
            check_validated(engine, key=f"{schedule.key}.monitor", instead="use a schedule without a monitor")
        self._group = engine.optimizer.param_groups[0]
        self._first_lr = self._lr()

    # Applying the schedules. ---------------------------------------------------------------------------------------

    def at_position(self, engine: Engine) -> None:
        """Apply the schedules at this step, because a resumed optimizer has the values of the checkpoint."""
        self._written = {}
        self._apply(engine)

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Step the schedules that count optimizer steps. A step that fp16 has skipped does not count."""
        if engine.stepper.stepped:
            self._step(engine, by_epoch=False)

    def after_train_epoch(self, engine: Engine) -> None:
        """Step the schedules that count epochs."""
        self._step(engine, by_epoch=True)

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """Pass the metrics to the schedules with a monitor. Only validations in training count."""
        if not self._group:
            return
        for _, schedule in self._monitored:
            schedule.observe(engine.validations.comparable, engine.progress.optimizer_step, engine.progress.epoch)
        self._apply(engine)

    def _step(self, engine: Engine, *, by_epoch: bool) -> None:
        for schedule in self._schedules:
            if schedule.by_epoch == by_epoch and schedule.monitor is None:
                schedule.step()
        self._apply(engine)

    def _apply(self, engine: Engine) -> None:
        """Write the values that differ from those of the previous step."""
        values: dict[GroupNumber, float] = {}
        for schedule in self._schedules:
            schedule.apply(values, engine.progress.optimizer_step, engine.progress.epoch)
        for number, value in values.items():
            if self._written.get(number) != value:
                number.write(value)
        self._written = values

    def after_train(self, engine: Engine) -> None:
        """Summarise the lr, if the hook has scheduled something."""
        begin = engine.progress.began_at
        end = engine.progress.iteration
        if self._schedules and end > begin:
            self._summary = f"{self._first_lr:.3g} at iteration {begin:,}, {self._lr():.3g} at iteration {end:,}"
            if name := next(iter(engine.run.optimizers)):  # several optimizers have names; this is the first one's lr
                self._summary = f"{name} {self._summary}"
        self._group = {}

    def _lr(self) -> float:
        """Return the lr of the first group; 0 if the optimizer has none."""
        return float(self._group.get("lr", 0.0))


def _set_mode(schedule: Schedule | TorchSchedule, monitor: str, higher: bool | None) -> None:
    """Set the schedule's `mode` to the direction of its metric, unless the config has a `mode`.

    Raises:
        UserError: the config has no `mode`, and the direction is not known.
    """
    of_metric = None if higher is None else "max" if higher else "min"
    if schedule.mode is None:
        if of_metric is None:
            raise unknown_direction(monitor, key=f"{schedule.key}.mode", choices=("max", "min"))
        cast("Schedule", schedule).mode = of_metric  # a scheduler of torch has a mode
    elif of_metric not in (None, schedule.mode):
        log.warning(
            "%s.mode=%s, but %s values of %s are good; mode=null uses the metric's direction",
            schedule.key,
            schedule.mode,
            "high" if higher else "low",
            monitor,
        )
