"""ParamSchedulerHook: applies the schedules."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from hydraloop.engine.hook import Hook, Priority
from hydraloop.errors import UserError
from hydraloop.hooks.shared.monitoring import check_metric, higher_is_better

if TYPE_CHECKING:
    from collections.abc import Iterable

    from hydraloop.engine.engine import Engine
    from hydraloop.optim.places import Place

log = logging.getLogger(__name__)


class _Schedule(Protocol):
    """What the hook needs of a schedule, `hydraloop.optim.Schedule` or `TorchSchedule`."""

    key: str
    by_epoch: bool
    """Count epochs; False: optimizer steps."""
    order: int
    """The optimizer step at which it begins."""
    monitor: str | None
    """The validation metric it follows; None: none."""
    mode: str | None
    """`min` or `max`; None: the metric's own direction."""

    def apply(self, values: dict[Place, float], optimizer_step: int, epoch: int) -> None: ...
    def step(self) -> None: ...
    def observe(self, metrics: Mapping[str, float], optimizer_step: int, epoch: int) -> None: ...


class ParamSchedulerHook(Hook):
    """Sets what the schedules of the run schedule: lr, momentum, weight decay, any number of the parameter groups.

    The schedules of a number are applied in the order of `begin`, then of the config, at each step from the value that
    the optimizer was given. They count optimizer steps (accumulated iterations and skipped fp16 steps are none) or
    epochs; one with a `monitor` (`plateau`) counts validations. The end summary says what the lr of the first
    parameter group was at first, at its highest and at last, as seen at records and epochs (fact `lr_summary`).

    Mount points: before_run, before_train, after_train_iter, on_log, after_train_epoch, after_val_epoch, after_train.
    Priority LOW, MMEngine's: after the logger, whose record has the lr that the iteration used, and before
    `checkpoint`. No host sync in an iteration. No state: the engine saves the schedules. No options, as in MMEngine.
    """

    priority = Priority.LOW

    def __init__(self) -> None:
        self._schedules: list[_Schedule] = []
        self._written: dict[Place, float] = {}
        self._group: dict[str, Any] | None = None
        self._first = self._highest = 0.0
        self._summary: str | None = None

    def before_run(self, engine: Engine) -> None:
        """Order the schedules; tell those that follow a metric its direction.

        Raises:
            UserError: a schedule monitors what no validation reports, or nothing says which of its values are good.
        """
        self._summary = None
        engine.messages.provide("lr_summary", lambda: self._summary)
        schedules = cast("Iterable[_Schedule]", engine.schedulers.values())
        self._schedules = sorted(schedules, key=lambda schedule: schedule.order)
        for schedule in self._schedules:
            if schedule.monitor is not None:
                check_metric(schedule.monitor, engine, key=f"{schedule.key}.monitor")
                _settle_mode(schedule, schedule.monitor, _direction(schedule.monitor, engine))

    def before_train(self, engine: Engine) -> None:
        """Apply the schedules where training begins."""
        for schedule in self._schedules:
            if schedule.monitor and (engine.loaders.val is None or engine.settings.val_interval is None):
                raise UserError(
                    f"it follows {schedule.monitor}, and nothing is validated",
                    key=f"{schedule.key}.monitor",
                    remedy="Set engine.val_interval and data.val, or use a schedule that follows no metric.",
                )
        self._written = {}
        self._apply(engine)
        group = engine.optimizer.param_groups[0]
        self._group = group if "lr" in group else None
        self._first = self._highest = self._lr()

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Apply the schedules after an optimizer step."""
        if engine.stepped:
            self._step(engine, by_epoch=False)

    def on_log(self, engine: Engine, record: Mapping[str, Any]) -> None:
        """Look at the lr."""
        self._highest = max(self._highest, self._lr())

    def after_train_epoch(self, engine: Engine) -> None:
        """Look at the lr, and apply the schedules."""
        self._highest = max(self._highest, self._lr())
        self._step(engine, by_epoch=True)

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """Tell the metrics to the schedules that follow one; not in a validation outside of training."""
        if self._group is None:
            return
        for schedule in self._schedules:
            if schedule.monitor is not None:
                schedule.observe(metrics, engine.progress.optimizer_step, engine.progress.epoch)
        self._apply(engine)

    def after_train(self, engine: Engine) -> None:
        """Summarise the lr where something has scheduled it."""
        begin, end, last = engine.began_at, engine.progress.iteration, self._lr()
        if self._group is not None and self._schedules and end > begin:
            self._summary = f"{self._first:.3g} at iteration {begin:,}, {last:.3g} at iteration {end:,}"
            if self._highest > max(self._first, last):
                self._summary += f", at most {self._highest:.3g}"
        self._group = None

    def _step(self, engine: Engine, *, by_epoch: bool) -> None:
        for schedule in self._schedules:
            if schedule.by_epoch == by_epoch and schedule.monitor is None:
                schedule.step()
        self._apply(engine)

    def _apply(self, engine: Engine) -> None:
        """Write the values that are not those of the step before."""
        values: dict[Place, float] = {}
        for schedule in self._schedules:
            schedule.apply(values, engine.progress.optimizer_step, engine.progress.epoch)
        for place, value in values.items():
            if self._written.get(place) != value:
                place.write(engine.optimizer, value)
        self._written = values

    def _lr(self) -> float:
        """The lr of the first group; 0 for an optimizer without one."""
        return 0.0 if self._group is None else float(self._group["lr"])


def _direction(metric: str, engine: Engine) -> bool | None:
    """Whether high values are good; None: nothing says it."""
    try:
        return higher_is_better(metric, engine, key="param_scheduler")
    except UserError:
        return None


def _settle_mode(schedule: _Schedule, monitor: str, higher: bool | None) -> None:
    """Follow the metric in its own direction, unless the config has a `mode`.

    Raises:
        UserError: neither says it.
    """
    own = None if higher is None else "max" if higher else "min"
    if schedule.mode is None:
        if own is None:
            raise UserError(
                f"nothing says whether high or low values of {monitor!r} are good",
                key=f"{schedule.key}.mode",
                remedy=f"Set {schedule.key}.mode=max or {schedule.key}.mode=min.",
            )
        schedule.mode = own
    elif own not in (None, schedule.mode):
        good, bad = ("high", "rises") if higher else ("low", "falls")
        log.warning("%s.mode=%s, but %s values of %s are good: it acts while that %s; null takes the metric's own",
                    schedule.key, schedule.mode, good, monitor, bad)  # fmt: skip
