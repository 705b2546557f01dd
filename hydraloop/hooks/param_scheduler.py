"""ParamSchedulerHook: steps the schedules."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol, cast

from hydraloop.engine.hook import Hook, Priority
from hydraloop.errors import UserError
from hydraloop.hooks.shared.monitoring import higher_is_better

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)


class Steppable(Protocol):
    """What the hook needs of a schedule; `hydraloop.optim.schedule.Schedule` is one."""

    name: str
    """Its key under `scheduler`."""
    by_epoch: bool
    """Count epochs; False: optimizer steps."""
    monitor: str | None
    """The validation metric it follows; None: none."""

    def check_monitor(self, metric_names: tuple[str, ...]) -> None: ...
    def settle_mode(self, higher: bool | None) -> None: ...
    def step(self, n: int, metrics: Mapping[str, float] | None = None) -> None: ...


class ParamSchedulerHook(Hook):
    """Steps every schedule of the run, in the order of the config: lr, momentum, weight decay, whatever it changes.

    Schedules count optimizer steps (accumulated iterations and skipped fp16 steps are none) or epochs; one with a
    `monitor` (`ReduceLROnPlateau`) steps after each validation instead. After training, the log says what the lr was
    at first, at its highest and at last, as seen at records and epochs, of the first parameter group.

    Mount points: before_run, before_train, after_train_iter, on_log, after_train_epoch, after_val_epoch, after_train.
    Priority LOW, MMEngine's: behind the logger, whose record has the lr that the iteration used, and before
    `checkpoint`, which saves the stepped schedules. No host sync in an iteration. No state: the engine saves the
    schedules. No options, as in MMEngine.
    """

    priority = Priority.LOW

    def __init__(self) -> None:
        self._by_step: list[Steppable] = []
        self._by_epoch: list[Steppable] = []
        self._monitoring: list[Steppable] = []
        self._group: dict[str, Any] | None = None
        self._first = self._highest = 0.0

    def before_run(self, engine: Engine) -> None:
        """Sort the schedules by when they step; tell those that follow a metric its direction.

        Raises:
            UserError: a schedule monitors what no validation reports, or nothing says which of its values are good.
        """
        self._by_step, self._by_epoch, self._monitoring = [], [], []
        for schedule in cast("dict[str, Steppable]", engine.schedulers).values():
            if schedule.monitor is not None:
                schedule.check_monitor(engine.metric_names)
                schedule.settle_mode(_direction(schedule.monitor, engine))
                self._monitoring.append(schedule)
            else:
                (self._by_epoch if schedule.by_epoch else self._by_step).append(schedule)

    def before_train(self, engine: Engine) -> None:
        """Note the lr that training begins with."""
        if self._monitoring and (engine.loaders.val is None or engine.settings.val_interval is None):
            schedule = self._monitoring[0]
            raise UserError(
                f"it follows {schedule.monitor}, and nothing is validated",
                key=f"scheduler.{schedule.name}.monitor",
                remedy="Set engine.val_interval and data.val, or use a schedule that follows no metric.",
            )
        group = engine.optimizer.param_groups[0]
        self._group = group if "lr" in group else None
        self._first = self._highest = self._lr()

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Step those that count optimizer steps, if there was one."""
        if engine.stepped:
            for schedule in self._by_step:
                schedule.step(engine.progress.optimizer_step)

    def on_log(self, engine: Engine, record: Mapping[str, Any]) -> None:
        """Look at the lr."""
        self._highest = max(self._highest, self._lr())

    def after_train_epoch(self, engine: Engine) -> None:
        """Look at the lr, and step those that count epochs."""
        self._highest = max(self._highest, self._lr())
        for schedule in self._by_epoch:
            schedule.step(engine.progress.epoch)

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """Step those that follow a metric; not in a validation outside of training."""
        if self._group is None:
            return
        for schedule in self._monitoring:
            progress = engine.progress
            schedule.step(progress.epoch if schedule.by_epoch else progress.optimizer_step, metrics)

    def after_train(self, engine: Engine) -> None:
        """Summarise the lr where something has scheduled it."""
        trained = engine.progress.iteration > engine.began_at
        if self._group is not None and engine.schedulers and engine.distributed.is_main and trained:
            last = self._lr()
            log.info(
                "lr: %.3g at iteration %d, %.3g at iteration %d%s",
                *(self._first, engine.began_at, last, engine.progress.iteration),
                f", at most {self._highest:.3g}" if self._highest > max(self._first, last) else "",
            )
        self._group = None

    def _lr(self) -> float:
        """The lr of the first group; 0 for an optimizer without one."""
        return 0.0 if self._group is None else float(self._group["lr"])


def _direction(metric: str, engine: Engine) -> bool | None:
    """Whether high values are good; None: nothing says it."""
    try:
        return higher_is_better(metric, engine, key="param_scheduler")
    except UserError:
        return None
