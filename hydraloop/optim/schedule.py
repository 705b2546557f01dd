"""Schedule: one torch scheduler, and when it steps."""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from hydraloop.errors import UserError, suggestion
from hydraloop.optim.horizon import HORIZONS, fill_horizon

log = logging.getLogger(__name__)


class Schedule:
    """One of torch's schedulers (or one like it), stepped between `begin` and `end`.

    Counted in optimizer steps, or in epochs with `by_epoch`. With n of them done, the n+1-th uses the scheduler's value
    at n - begin. Until `begin` the scheduler does nothing, and what it starts from is what the optimizer has by then;
    the value at `end` stays. So `begin: 100` of one and `end: 100` of another join without a gap; schedules that
    overlap multiply, as torch's do when they are chained.

    Several schedules step in the order of the config.

    Args:
        name: its key in the config.
        factory: makes the scheduler, given the optimizer.
        optimizer: whose groups it changes (lr; momentum, weight decay or any other key, as the scheduler does).
        by_epoch: count epochs; False: optimizer steps.
        begin: the first n at which it acts.
        end: the last n at which it acts; None: the end of training.
        monitor: the validation metric it follows (`ReduceLROnPlateau`); None for the others.
    """

    def __init__(
        self,
        name: str,
        factory: functools.partial[Any],
        optimizer: Optimizer,
        *,
        by_epoch: bool = False,
        begin: int = 0,
        end: int | None = None,
        monitor: str | None = None,
    ) -> None:
        self.name = name
        self.factory = factory
        self.optimizer = optimizer
        self.by_epoch = by_epoch
        self.begin = begin
        self.end = end
        self.monitor = monitor
        self.scheduler: LRScheduler | None = None
        """None until `begin`."""
        self._horizons = {name: value for name, value in factory.keywords.items() if name in HORIZONS}
        if begin == 0:
            self.scheduler = factory(optimizer)
        else:
            # Made once for nothing: a wrong argument is an error now and not in the middle of the training.
            with _groups_kept(optimizer):
                factory(optimizer)

    @property
    def key(self) -> str:
        """Its place in the config."""
        return f"scheduler.{self.name}"

    def check_monitor(self, metric_names: tuple[str, ...]) -> None:
        """Refuse a `monitor` that no validation reports.

        Raises:
            UserError: names the close ones.
        """
        if self.monitor is not None and self.monitor not in metric_names:
            raise UserError(
                f"there is no metric {self.monitor!r}",
                key=f"{self.key}.monitor",
                remedy=suggestion(self.monitor, metric_names),
            )

    def step(self, n: int, metrics: Mapping[str, float] | None = None) -> None:
        """The n-th optimizer step (or epoch, with `by_epoch`) is done: step if that is due. No host sync.

        Args:
            n: counts from 1, each number once.
            metrics: of the validation just done. A schedule with `monitor` steps when it gets them, not otherwise;
                the others do not look at them.

        Raises:
            UserError: the metrics have no `monitor`.
        """
        if n < self.begin or (self.end is not None and n > self.end):
            return
        if self.scheduler is None:
            self.scheduler = self.factory(self.optimizer)
            if self.monitor is None:
                return
        if self.monitor is None:
            self.scheduler.step()
        elif metrics is not None:
            self.check_monitor(tuple(metrics))
            self.scheduler.step(metrics[self.monitor])  # type: ignore[arg-type]  # a plateau's step takes the metric

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's own state (numbers, strings, lists); `scheduler` is None before `begin`."""
        return {"scheduler": None if self.scheduler is None else self.scheduler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what `state_dict` returned; the optimizer's groups keep their values, which it saves itself."""
        if state["scheduler"] is None:
            self.scheduler = None
            return
        if self.scheduler is None:
            with _groups_kept(self.optimizer):
                self.scheduler = self.factory(self.optimizer)
        self.scheduler.load_state_dict(state["scheduler"])
        self._keep_horizon()

    def _keep_horizon(self) -> None:
        """The length stays what this run's config says: a longer run goes on along its own, longer schedule."""
        scheduler: Any = self.scheduler
        changed = {name: value for name, value in self._horizons.items() if getattr(scheduler, name, value) != value}
        if not changed:
            return
        before = [group.get("lr") for group in self.optimizer.param_groups]
        for name, value in changed.items():
            setattr(scheduler, name, value)
        closed_form = getattr(scheduler, "_get_closed_form_lr", None)
        if closed_form is not None:  # the recursive form would go on from a value of the other schedule
            scheduler._last_lr = list(closed_form())
            for group, lr in zip(self.optimizer.param_groups, scheduler._last_lr, strict=True):
                group["lr"] = lr
        after = [group.get("lr") for group in self.optimizer.param_groups]
        lengths = ", ".join(f"{name}={value}" for name, value in changed.items())
        log.warning("%s: this run has %s, the one it goes on from had another length: lr %s, was %s",
                    self.key, lengths, after, before)  # fmt: skip


def build_schedule(
    name: str,
    factory: functools.partial[Any],
    optimizer: Optimizer,
    *,
    by_epoch: bool = False,
    begin: int = 0,
    end: int | None = None,
    monitor: str | None = None,
    steps_per_epoch: int,
    total_epochs: int,
    total_steps: int,
) -> Schedule:
    """A schedule from its config entry.

    Args:
        name: its key under `scheduler`.
        factory: of the scheduler (`_partial_: true`), without its optimizer; a null T_max, total_iters or total_steps
            becomes the length between `begin` and `end`, a null `steps_per_epoch` the run's.
        optimizer: whose groups it changes.
        by_epoch: `begin`, `end` and the scheduler's own numbers count epochs; False: optimizer steps.
        begin: the first n at which it acts, 0 or more.
        end: the last n at which it acts, above `begin`; None: the end of training.
        monitor: the validation metric a `ReduceLROnPlateau` follows.
        steps_per_epoch: optimizer steps of an epoch of the run.
        total_epochs: of the run.
        total_steps: optimizer steps of the run.

    Raises:
        UserError: begin and end do not fit, the target makes no scheduler, or refuses its arguments, or only one of
            `monitor` and `ReduceLROnPlateau` is there.
    """
    key = f"scheduler.{name}"
    if not isinstance(factory, functools.partial):
        raise UserError("must be built with the optimizer", key=key, remedy="Set _partial_: true.")
    if begin < 0:
        raise UserError(f"{begin} is negative", key=f"{key}.begin", remedy="Use 0 for the start of training.")
    if end is not None and begin >= end:
        raise UserError(
            f"{begin} is not before the end, {end}",
            key=f"{key}.begin",
            remedy=f"Use a begin below {end}, a later {key}.end, or {key}.end=null for the end of training.",
        )
    is_plateau = isinstance(factory.func, type) and issubclass(factory.func, ReduceLROnPlateau)
    if is_plateau and monitor is None:
        raise UserError(
            "ReduceLROnPlateau follows a metric, and none is named",
            key=f"{key}.monitor",
            remedy=f"Name one: {key}.monitor=loss is the validation loss.",
        )
    if monitor is not None and not is_plateau:
        raise UserError(
            f"{getattr(factory.func, '__name__', factory.func)} follows no metric",
            key=f"{key}.monitor",
            remedy="Leave it null; only ReduceLROnPlateau takes one.",
        )
    last = end if end is not None else (total_epochs if by_epoch else total_steps)
    # A begin behind the end of a short run (a debug run) is no mistake: the schedule then never begins.
    factory = fill_horizon(factory, max(1, last - begin))
    if "steps_per_epoch" in factory.keywords and factory.keywords["steps_per_epoch"] is None:
        factory = functools.partial(factory, steps_per_epoch=steps_per_epoch)
    try:
        schedule = Schedule(name, factory, optimizer, by_epoch=by_epoch, begin=begin, end=end, monitor=monitor)
    except (TypeError, ValueError) as error:
        raise UserError(str(error), key=key, remedy="Check its arguments.") from error
    return schedule


@contextmanager
def _groups_kept(optimizer: Optimizer) -> Iterator[None]:
    """Undo what a scheduler's constructor writes into the optimizer's groups (lr, initial_lr, momentum, ...)."""
    before = [_copied(group) for group in optimizer.param_groups]
    try:
        yield
    finally:
        for group, old in zip(optimizer.param_groups, before, strict=True):
            group.clear()
            group.update(old)


def _copied(group: dict[str, Any]) -> dict[str, Any]:
    """A group with its own tensors (an lr may be one); the parameters are the same ones."""
    return {
        name: value.clone() if name != "params" and isinstance(value, Tensor) else value
        for name, value in group.items()
    }
