"""From the config to the schedules of a run."""

from __future__ import annotations

import dataclasses
import sys
from typing import Any, NamedTuple, cast

from omegaconf import DictConfig, OmegaConf
from torch.optim import Optimizer

from hydraloop.engine.checkpoint.format import Position
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.named_optimizers import parts
from hydraloop.engine.progress import Progress
from hydraloop.engine.run_parts import Settings
from hydraloop.errors import UserError
from hydraloop.optim.schedule import Schedule
from hydraloop.optim.schedule_functions import Function, Plateau
from hydraloop.optim.torch_schedule import TorchSchedule, check_monitor
from hydraloop.safety.instantiate import instantiate
from hydraloop.schemas.scheduler import no_such_optimizer

_FIELDS = ("param", "by_epoch", "convert_to_iter_based", "begin", "end", "monitor")
"""Options of an entry that are arguments of `build_schedule`; the others are arguments of its function."""


class Length(NamedTuple):
    """The length of a run."""

    epochs: int
    steps: int
    """Optimizer steps."""
    steps_per_epoch: int


def build_schedules(
    cfg: DictConfig, optimizer: Optimizer, settings: Settings, loaders: Loaders, position: Position | None = None
) -> dict[str, Schedule | TorchSchedule]:
    """Return the schedules of the group `scheduler` by name.

    Args:
        position: of the run that is resumed.

    Raises:
        UserError: see `build_schedule`; there is no optimizer of the name; or a scheduler of torch is not the only
            schedule of its optimizer.
    """
    run = _length_of_run(settings, loaders, position)
    schedules: dict[str, Schedule | TorchSchedule] = {}
    changed: dict[str, set[Optimizer]] = {}
    for name, node in cfg.scheduler.items():
        if node is None:
            continue
        options = cast(dict[Any, Any], OmegaConf.to_container(node, resolve=True))
        fields = {field: options.pop(field) for field in _FIELDS if field in options}
        chosen = _chosen(optimizer, options.pop("optimizer", None), f"scheduler.{name}.optimizer")
        made = instantiate(OmegaConf.create(options), f"scheduler.{name}")
        schedules[str(name)] = build_schedule(str(name), made, chosen, run, **fields)
        changed[str(name)] = {*parts(chosen).values()}
    for name, schedule in schedules.items():
        shared = any(changed[name] & changed[other] for other in schedules if other != name)
        if isinstance(schedule, TorchSchedule) and shared:
            raise _only_the_lr(f"scheduler.{name}", "another schedule")
    return schedules


def _chosen(optimizer: Optimizer, name: str | None, key: str) -> Optimizer:
    named = parts(optimizer)
    if name is None:
        return optimizer
    if not name or name not in named:
        raise no_such_optimizer(name, named, key)
    return named[name]


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
    """Return a schedule. Other arguments than these are those of `Schedule`.

    Args:
        made: a function of the step, or a partial that makes a scheduler of torch or another package.
        run: the length of the run.
        convert_to_iter_based: `begin`, `end` and the function's lengths count epochs, but the value changes after each
            optimizer step.
        end: the n at which it ends; None: the end of training.

    Raises:
        UserError: `begin` is not before `end`, a metric is missing or not used, or there are no epochs to convert.
    """
    key = f"scheduler.{name}"
    if not isinstance(made, Function):
        others = {"param": param != "lr", "convert_to_iter_based": convert_to_iter_based, "begin": begin, "end": end}
        for field, value in others.items():
            if value:
                raise _only_the_lr(key, field)
        length = max(1, run.epochs if by_epoch else run.steps)
        return TorchSchedule(name, made, optimizer, by_epoch=by_epoch, monitor=monitor, length=length)
    check_monitor(monitor, key, follows=isinstance(made, Plateau))
    if end is not None and begin >= end:
        raise UserError(
            f"begin={begin} is not before end={end}",
            key=f"{key}.begin",
            remedy=f"Use a begin below {end}, a later {key}.end, or {key}.end=null for the end of training.",
        )
    if convert_to_iter_based:
        _check_counts_epochs(made, key, by_epoch=by_epoch)
        steps = max(1, run.steps_per_epoch)  # 0 without training data
        made, by_epoch = _in_steps(made, steps), False
        begin, end = begin * steps, None if end is None else end * steps
    if end is None:
        end = sys.maxsize if isinstance(made, Plateau) else max(run.epochs if by_epoch else run.steps, begin + 1)
    options: dict[str, Any] = {"param": param, "by_epoch": by_epoch, "begin": begin, "end": end, "monitor": monitor}
    return Schedule(name, made, optimizer, steps_per_epoch=run.steps_per_epoch, **options)


def _length_of_run(settings: Settings, loaders: Loaders, position: Position | None) -> Length:
    """Return the run's length. A resumed run adds to the steps of the checkpoint, which may have had other options."""
    epoch_length = settings.limited("train", len(loaders.train or ()))
    progress, skipped = (Progress(), 0) if position is None else position[:2]
    progress.set_length(settings, epoch_length)
    left = max(progress.max_iters - progress.iteration, 0)
    in_this_epoch = min(left, max(epoch_length - progress.batch_in_epoch, 0))
    whole, rest = divmod(left - in_this_epoch, max(epoch_length, 1))
    first, steps_per_epoch, last = (-(-part // settings.accumulate) for part in (in_this_epoch, epoch_length, rest))
    # With the skipped steps, as in a run that is not resumed. With steps of the task, an iteration may skip several.
    done = min(progress.optimizer_step + skipped, progress.iteration)
    return Length(progress.max_epochs, done + first + whole * steps_per_epoch + last, steps_per_epoch)


def _in_steps(function: Function, steps: int) -> Function:
    """Return the function with lengths in optimizer steps, as MMEngine's `build_iter_from_epoch` does."""
    lengths = {name: value for name in function.lengths if (value := getattr(function, name)) is not None}
    for name, value in lengths.items():
        lengths[name] = value * steps if isinstance(value, int) else [number * steps for number in value]
    return dataclasses.replace(cast(Any, function), **lengths) if lengths else function


def _check_counts_epochs(function: Function, key: str, *, by_epoch: bool) -> None:
    if isinstance(function, Plateau) or not by_epoch:
        raise UserError(
            "there are no epochs to convert",
            key=f"{key}.convert_to_iter_based",
            remedy=f"Set {key}.by_epoch=true to count epochs, or {key}.convert_to_iter_based=false.",
        )


def _only_the_lr(key: str, not_possible: str) -> UserError:
    return UserError(
        f"{not_possible} is not possible with a scheduler of torch or another package: it must be the only schedule "
        "of its optimizer, and changes the lr",
        key=key,
        remedy=f"Use an option of the group scheduler, or a function: {key}._target_=hydraloop.optim.MultiStep.",
    )
