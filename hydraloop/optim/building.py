"""Schedules from their config entries."""

from __future__ import annotations

import dataclasses
import functools
import logging
import sys
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hydraloop.engine.checkpoint.format import peek
from hydraloop.engine.inputs import Loaders, Settings
from hydraloop.errors import UserError
from hydraloop.optim.checking import check_arguments, check_begin_and_end, check_room
from hydraloop.optim.functions import Function
from hydraloop.optim.plateau import Plateau
from hydraloop.optim.schedule import Schedule
from hydraloop.optim.torch_schedule import TorchSchedule
from hydraloop.safety.instantiate import instantiate

log = logging.getLogger(__name__)

_FIELDS = {
    "param": "lr",
    "by_epoch": False,
    "convert_to_iter_based": False,
    "begin": 0,
    "end": None,
    "monitor": None,
}
"""The fields of an entry that say what a schedule changes and when, with their defaults; the rest are arguments."""


class Length(NamedTuple):
    """The length of a run."""

    epochs: int
    steps: int
    """Optimizer steps."""
    steps_per_epoch: int


def build_schedules(
    cfg: DictConfig, optimizer: Optimizer, settings: Settings, loaders: Loaders
) -> dict[str, Schedule | TorchSchedule]:
    """Return the schedules of the group `scheduler` by name.

    Raises:
        UserError: see `build_schedule`; or a scheduler of torch is not the only schedule.
    """
    run = _length(settings, loaders)
    schedules: dict[str, Schedule | TorchSchedule] = {}
    for name, node in cfg.scheduler.items():
        if node is None:
            continue
        key = f"scheduler.{name}"
        plain = OmegaConf.create(cast(dict[Any, Any], OmegaConf.to_container(node, resolve=True)))
        fields = {field: plain.pop(field, default) for field, default in _FIELDS.items()}
        schedules[str(name)] = build_schedule(str(name), instantiate(plain, key), optimizer, run, **fields)
    for name, schedule in schedules.items():
        if isinstance(schedule, TorchSchedule) and len(schedules) > 1:
            raise _only_the_lr(f"scheduler.{name}", "another schedule")
    return schedules


def build_schedule(
    name: str,
    made: Any,
    optimizer: Optimizer,
    run: Length,
    *,
    param: str = "lr",
    by_epoch: bool = False,
    convert_to_iter_based: bool = False,
    begin: int = 0,
    end: int | None = None,
    monitor: str | None = None,
) -> Schedule | TorchSchedule:
    """Return a schedule.

    Args:
        name: its key under `scheduler`.
        made: a function of the step, or what makes a scheduler of torch (`_partial_: true`).
        optimizer: whose groups it changes.
        run: the length of the run.
        param: which number of the groups; see `Schedule`.
        by_epoch: `begin`, `end` and the schedule's arguments count epochs; False: optimizer steps.
        convert_to_iter_based: they count epochs, and the value changes after each optimizer step.
        begin: the first n at which it acts, 0 or more.
        end: the n at which it ends; None: the end of training.
        monitor: the validation metric that a `Plateau` follows.

    Raises:
        UserError: an argument is out of range, begin and end do not fit, a metric is missing or not used, or epochs
            cannot be converted.
    """
    key = f"scheduler.{name}"
    made = _flat(made)
    if isinstance(made, functools.partial) and isinstance(made.func, type) and issubclass(made.func, Function):
        made = made()
    if not isinstance(made, Function):
        given = {"param": param != "lr", "convert_to_iter_based": convert_to_iter_based, "begin": begin, "end": end}
        for field, value in given.items():
            if value:
                raise _only_the_lr(key, field)
        return _torch_schedule(name, made, optimizer, run, by_epoch=by_epoch, monitor=monitor)
    check_begin_and_end(begin, end, key)
    check_arguments(made, key)
    _check_monitor(isinstance(made, Plateau), made, monitor, key)
    _check_length(made, begin, end, run, key, by_epoch=by_epoch)
    if convert_to_iter_based:
        if not by_epoch or isinstance(made, Plateau):
            raise UserError(
                "there are no epochs to convert",
                key=f"{key}.convert_to_iter_based",
                remedy=f"Set {key}.by_epoch=true, which makes begin, end and the lengths count epochs, or "
                f"{key}.convert_to_iter_based=false.",
            )
        steps = max(1, run.steps_per_epoch)  # without training data there are none
        made = _in_steps(made, steps)
        by_epoch, begin, end = False, begin * steps, None if end is None else end * steps
    if end is None:
        end = sys.maxsize if isinstance(made, Plateau) else max(run.epochs if by_epoch else run.steps, begin + 1)
    schedule = Schedule(
        name,
        made,
        optimizer,
        param=param,
        by_epoch=by_epoch,
        begin=begin,
        end=end,
        monitor=monitor,
        steps_per_epoch=run.steps_per_epoch,
    )
    _warn_of_little_effect(schedule, param)
    return schedule


def _length(settings: Settings, loaders: Loaders) -> Length:
    """The run's length; a resumed run may have had epochs of another length."""
    epoch_length = 0 if loaders.train is None else len(loaders.train)
    steps_per_epoch = -(-epoch_length // settings.accumulate)
    if settings.max_iters is not None:
        whole, rest = divmod(settings.max_iters, max(epoch_length, 1))
        return Length(whole + bool(rest), whole * steps_per_epoch + -(-rest // settings.accumulate), steps_per_epoch)
    epochs, steps = settings.max_epochs, settings.max_epochs * steps_per_epoch
    done = None if settings.resume is None else peek(settings.resume, key="resume")
    if done is not None and done.epoch_length not in (None, epoch_length):  # other ranks, or another batch size
        steps = done.optimizer_step + max(epochs - done.epoch, 0) * steps_per_epoch
    return Length(epochs, steps, steps_per_epoch)


def _torch_schedule(
    name: str, factory: Any, optimizer: Optimizer, run: Length, *, by_epoch: bool, monitor: str | None
) -> TorchSchedule:
    key = f"scheduler.{name}"
    if not isinstance(factory, functools.partial):
        raise UserError(
            "this is not a schedule",
            key=key,
            remedy="For a scheduler of torch or another package, set _partial_: true.",
        )
    _check_monitor(factory.func is ReduceLROnPlateau, factory.func, monitor, key)
    length = max(1, run.epochs if by_epoch else run.steps)
    return TorchSchedule(name, factory, optimizer, by_epoch=by_epoch, monitor=monitor, length=length)


def _only_the_lr(key: str, not_possible: str) -> UserError:
    return UserError(
        f"{not_possible} is not possible with a scheduler of torch or another package, which can only be the one "
        "schedule of the run, of the lr",
        key=key,
        remedy="Use options of the group scheduler, or functions of hydraloop.optim: "
        f"{key}._target_=hydraloop.optim.Step.",
    )


def _flat(made: Any) -> Any:
    """Return a partial with the class itself as `func`: Hydra's are of a kind that does not flatten."""
    if not isinstance(made, functools.partial):
        return made
    inner = _flat(made.func)
    if not isinstance(inner, functools.partial):
        return made
    return functools.partial(inner.func, *inner.args, *made.args, **{**inner.keywords, **made.keywords})


def _in_steps(function: Function, steps: int) -> Function:
    """Return the function of optimizer steps, as MMEngine's `build_iter_from_epoch`."""
    changed: dict[str, Any] = {}
    for name in function.lengths:
        value = getattr(function, name)
        if value is not None:
            changed[name] = value * steps if isinstance(value, int) else [number * steps for number in value]
    return dataclasses.replace(cast(Any, function), **changed) if changed else function


def _check_monitor(is_plateau: bool, target: Any, monitor: str | None, key: str) -> None:
    """Refuse a metric without a schedule that follows one, and such a schedule without a metric."""
    if is_plateau and monitor is None:
        raise UserError(
            "a plateau follows a metric, and none is named",
            key=f"{key}.monitor",
            remedy=f"Name one: {key}.monitor=loss is the validation loss.",
        )
    if monitor is not None and not is_plateau:
        name = getattr(target, "__name__", type(target).__name__)
        raise UserError(
            f"{name} follows no metric", key=f"{key}.monitor", remedy="Leave it null; only scheduler=plateau takes one."
        )


def _check_length(function: Function, begin: int, end: int | None, run: Length, key: str, *, by_epoch: bool) -> None:
    """Compare the schedule with the run. A run may be short for debugging, so only a warm-up must fit."""
    total, unit = (run.epochs, "epochs") if by_epoch else (run.steps, "optimizer steps")
    if total < 1:  # nothing is trained
        return
    if begin >= total:
        log.warning("%s begins after %d %s and the run ends after %d: it does nothing", key, begin, unit, total)
        return
    if end is not None and end > total:
        log.warning("%s ends after %d %s and the run after %d: its end is not reached", key, end, unit, total)
    check_room(function, (total if end is None else end) - begin, key, unit)


def _warn_of_little_effect(schedule: Schedule, param: str) -> None:
    """Warn of a share of 0, and of a length that leaves the rest of the training at the lowest value."""
    function = schedule.function
    to_a_number = any(getattr(function, name, None) for name in ("eta_min", "max_lr"))
    if not to_a_number and not any(schedule.initial_values()):
        log.warning("%s: %s is 0 in all groups, and a share of 0 stays 0", schedule.key, param)
    steps = getattr(function, function.lowest_after) if function.lowest_after else None
    room = schedule.end - schedule.begin
    if steps is not None and steps < room - 1:
        log.warning("%s is over after %d of the %d steps between its begin and its end, and its last value, the "
                    "lowest, stays; a length of null means all of them", schedule.key, steps, room)  # fmt: skip
