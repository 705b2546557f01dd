"""A schedule from its config entry."""

from __future__ import annotations

import functools
import inspect
import logging
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR, PolynomialLR, ReduceLROnPlateau

from hydraloop.errors import UserError
from hydraloop.optim.checking import check_arguments, check_begin_and_end, check_room
from hydraloop.optim.horizon import fill_horizon, from_epochs
from hydraloop.optim.schedule import Schedule
from hydraloop.optim.schedulers import YOLOXLR, WarmupCosineLR
from hydraloop.optim.shadow import Place, places, read

log = logging.getLogger(__name__)


def build_schedule(
    name: str,
    factory: functools.partial[Any],
    optimizer: Optimizer,
    *,
    param: str = "lr",
    by_epoch: bool = False,
    convert_to_iter_based: bool = False,
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
            becomes the length between `begin` and `end`, a null `steps_per_epoch` the run's, a null `max_lr` what
            the optimizer begins with.
        optimizer: whose groups it changes.
        param: which key of the groups; see `Schedule`.
        by_epoch: `begin`, `end` and the scheduler's own numbers count epochs; False: optimizer steps.
        convert_to_iter_based: they do, and it steps after each optimizer step nevertheless.
        begin: the first n at which it acts, 0 or more.
        end: the last n at which it acts, above `begin`; None: the end of training.
        monitor: the validation metric a `ReduceLROnPlateau` follows.
        steps_per_epoch: optimizer steps of an epoch of the run.
        total_epochs: of the run.
        total_steps: optimizer steps of the run.

    Raises:
        UserError: an argument is out of range, begin and end do not fit, the target makes no scheduler, or refuses its
            arguments, only one of `monitor` and `ReduceLROnPlateau` is there, or what is to be converted cannot be.
    """
    key = f"scheduler.{name}"
    if not isinstance(factory, functools.partial):
        raise UserError("must be built with the optimizer", key=key, remedy="Set _partial_: true.")
    factory = _flat(factory)
    check_begin_and_end(begin, end, key)
    _check_monitor(factory, monitor, key)
    check_arguments(factory, key)
    where = places(optimizer, param, f"{key}.param")
    unit = "epochs" if by_epoch else "optimizer steps"
    _check_length(factory, begin, end, total_epochs if by_epoch else total_steps, key, unit)
    if not any(float(read(optimizer, place)) for place in where) and not _lifts(factory):
        log.warning("%s: %s is 0 in all groups, and a share of 0 stays 0", key, param)
    if convert_to_iter_based:
        if not by_epoch:
            raise UserError(
                "there are no epochs to convert",
                key=f"{key}.convert_to_iter_based",
                remedy=f"Set {key}.by_epoch=true, which makes begin, end and the lengths count epochs, or "
                f"{key}.convert_to_iter_based=false.",
            )
        steps = max(1, steps_per_epoch)  # without training data there are none
        factory = from_epochs(factory, steps, key)
        by_epoch, begin, end = False, begin * steps, None if end is None else end * steps
    last = end if end is not None else (total_epochs if by_epoch else total_steps)
    factory = fill_horizon(factory, max(1, last - begin))
    factory = _fill_cycle(factory, optimizer, where, steps_per_epoch, beside_the_lr=param == "lr")
    _check_last_value(factory, last - begin, key)
    try:
        schedule = Schedule(
            name, factory, optimizer, param=param, by_epoch=by_epoch, begin=begin, end=end, monitor=monitor
        )
    except (TypeError, ValueError, ArithmeticError) as error:
        raise UserError(str(error), key=key, remedy="Check its arguments.") from error
    if factory.func is OneCycleLR:  # it has no value behind its last, and raises; that one stays
        one_cycle = begin + _steps_of(factory) - 1
        schedule.end = one_cycle if end is None else min(end, one_cycle)
    return schedule


def _fill_cycle(
    factory: functools.partial[Any],
    optimizer: Optimizer,
    where: list[Place],
    steps_per_epoch: int,
    *,
    beside_the_lr: bool,
) -> functools.partial[Any]:
    """What OneCycleLR and CyclicLR leave open: the highest value, the length of an epoch; no momentum but the lr's."""
    filled: dict[str, Any] = {}
    if factory.keywords.get("steps_per_epoch", 1) is None:
        filled["steps_per_epoch"] = steps_per_epoch
    if factory.keywords.get("max_lr", 1) is None:
        groups = optimizer.param_groups
        first = [groups[place.group].get(place.initial, read(optimizer, place)) for place in where]
        filled["max_lr"] = [float(value) for value in first]
    if not beside_the_lr and "cycle_momentum" in inspect.signature(factory.func).parameters:
        filled["cycle_momentum"] = False
    return functools.partial(factory, **filled)


def _check_monitor(factory: functools.partial[Any], monitor: str | None, key: str) -> None:
    """Refuse a metric without a schedule that follows one, and such a schedule without a metric."""
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


def _lifts(factory: functools.partial[Any]) -> bool:
    """Whether it goes to a number of its own, and not to a share of what the optimizer has."""
    return any(factory.keywords.get(name) for name in ("eta_min", "max_lr"))


def _check_length(factory: functools.partial[Any], begin: int, end: int | None, run: int, key: str, unit: str) -> None:
    """Compare the schedule with the run.

    What lies behind the end of a short run (one for debugging) is no mistake, but worth a line in the log.
    """
    if run < 1:  # nothing is trained
        return
    if begin >= run:
        log.warning("%s begins after %d %s and the run ends after %d: it does nothing", key, begin, unit, run)
    elif end is not None and end > run:
        log.warning("%s ends after %d %s and the run after %d: its end is not reached", key, end, unit, run)
    if begin < run:
        length = factory.keywords.get("total_iters") or (run if end is None else end) - begin
        check_room(factory.keywords, length, key, unit)


def _flat(factory: functools.partial[Any]) -> functools.partial[Any]:
    """With the class itself as `func` and all arguments beside it: Hydra's are of a kind that does not flatten."""
    target: Any
    target, args, keywords = factory.func, factory.args, factory.keywords
    while isinstance(target, functools.partial):
        target, args, keywords = target.func, (*target.args, *args), {**target.keywords, **keywords}
    return functools.partial(target, *args, **keywords)


def _check_last_value(factory: functools.partial[Any], room: int, key: str) -> None:
    """A length of its own that leaves the rest of the training at the lowest value is seldom meant."""
    if factory.func is OneCycleLR:
        length = _steps_of(factory)
    elif factory.func in (PolynomialLR, WarmupCosineLR, YOLOXLR):
        length = factory.keywords.get("total_iters", room)
    else:
        return
    if length < room:
        log.warning("%s is over after %d of the %d steps between its begin and its end, and its last value, the "
                    "lowest, stays; a length of null means all of them", key, length, room)  # fmt: skip


def _steps_of(factory: functools.partial[Any]) -> int:
    """The number of values that a OneCycleLR has."""
    given = factory.keywords
    steps: int = given.get("total_steps") or given["epochs"] * given["steps_per_epoch"]
    return steps
