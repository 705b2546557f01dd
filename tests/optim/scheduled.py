"""Helpers for the tests of schedules: an optimizer with two parameter groups, and schedules for it."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import torch
from omegaconf import OmegaConf
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from hydraloop.optim import Length, build_schedule
from hydraloop.safety.instantiate import instantiate
from hydraloop.schemas.scheduler import OPTIONS

LRS = (1.0, 0.2)
"""The learning rates of the two groups."""
STEPS_PER_EPOCH, EPOCHS = 5, 12
STEPS = STEPS_PER_EPOCH * EPOCHS
OURS = ("param", "by_epoch", "convert_to_iter_based", "begin", "end", "monitor")


def two_groups(kind: type[Optimizer] = SGD) -> Optimizer:
    """SGD with momentum or AdamW, over two groups of one parameter each."""
    parameters = [nn.Parameter(torch.zeros(1)) for _ in LRS]
    for parameter in parameters:
        parameter.grad = torch.zeros(1)
    groups = [{"params": [parameter], "lr": lr} for parameter, lr in zip(parameters, LRS, strict=True)]
    optimizer: Any = SGD(groups, momentum=0.9, weight_decay=0.1) if kind is SGD else AdamW(groups, weight_decay=0.1)
    optimizer.param_groups[1]["weight_decay"] = 0.5
    return optimizer  # type: ignore[no-any-return]


def option(
    name: str, optimizer: Optimizer, *, epochs: int = EPOCHS, steps_per_epoch: int = STEPS_PER_EPOCH, **changes: Any
) -> Any:
    """An option as the builder makes it from the config, with `changes` of its fields."""
    node: Any = OmegaConf.to_container(OmegaConf.structured(OPTIONS[name](**changes)))
    del node["optimizer"]
    ours = {field: node.pop(field) for field in OURS if field in node}
    function = instantiate(OmegaConf.create(node), f"scheduler.{name}")
    return of(name, function, optimizer, epochs=epochs, steps_per_epoch=steps_per_epoch, **ours)


def of(
    name: str,
    made: Any,
    optimizer: Optimizer,
    *,
    epochs: int = EPOCHS,
    steps_per_epoch: int = STEPS_PER_EPOCH,
    **ours: Any,
) -> Any:
    """A schedule for a run of this length."""
    run = Length(epochs, epochs * steps_per_epoch, steps_per_epoch)
    return build_schedule(name, made, optimizer, run, **ours)


def values(optimizer: Optimizer, key: str | Sequence[str] = "lr") -> list[Any]:
    """The value of each group; with several keys, the list of its values."""
    groups = optimizer.param_groups
    return [group[key] if isinstance(key, str) else [group[name] for name in key] for group in groups]


def apply(optimizer: Optimizer, schedules: Sequence[Any], step: int, epoch: int = 0) -> None:
    """Apply the schedules to the optimizer's values, as the hook does."""
    found: dict[Any, float] = {}
    for schedule in sorted(schedules, key=lambda schedule: schedule.order):
        schedule.apply(found, step, epoch)
    for place, value in found.items():
        place.write(value)


def run(
    optimizer: Optimizer,
    schedules: Sequence[Any],
    last: int = STEPS,
    *,
    first: int = 1,
    key: str | Sequence[str] = "lr",
    losses: Sequence[float] = (),
) -> list[list[Any]]:
    """Return the values before step `first` and after each step up to `last`. Each epoch ends with a validation."""
    apply(optimizer, schedules, first - 1, (first - 1) // STEPS_PER_EPOCH)
    seen = [values(optimizer, key)]
    for n in range(first, last + 1):
        optimizer.step()
        epoch, rest = divmod(n, STEPS_PER_EPOCH)
        for schedule in schedules:
            if schedule.monitor is not None and not rest:
                schedule.observe({schedule.monitor: losses[epoch - 1] if losses else 1.0}, n, epoch)
            elif schedule.monitor is None and (not schedule.by_epoch or not rest):
                schedule.step()
        apply(optimizer, schedules, n, epoch)
        seen.append(values(optimizer, key))
    return seen


def resumed(
    optimizer: Optimizer, schedules: Sequence[Any], make: Callable[[Optimizer], list[Any]]
) -> tuple[Optimizer, list[Any]]:
    """Save everything without pickle, and load it into a new optimizer and the schedules that `make` builds for it."""
    file = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "schedules": [s.state_dict() for s in schedules]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = two_groups(type(optimizer))
    made = make(fresh)
    fresh.load_state_dict(saved["optimizer"])
    for schedule, state in zip(made, saved["schedules"], strict=True):
        schedule.load_state_dict(state)
    return fresh, made
