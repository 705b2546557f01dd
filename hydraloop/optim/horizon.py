"""How long a schedule is: where its options leave that open, and where they count epochs and it steps more often."""

from __future__ import annotations

import functools
import inspect
from typing import Any

from torch.optim import lr_scheduler as torchs

from hydraloop.errors import UserError

HORIZONS = ("T_max", "total_iters", "total_steps")
"""The arguments of torch's schedulers that mean "the whole length", in scheduler steps."""

_LENGTHS: dict[Any, tuple[str, ...]] = {
    torchs.ConstantLR: ("total_iters",),
    torchs.CosineAnnealingLR: ("T_max",),
    torchs.CosineAnnealingWarmRestarts: ("T_0",),
    torchs.CyclicLR: ("step_size_up", "step_size_down"),
    torchs.ExponentialLR: (),
    torchs.LinearLR: ("total_iters",),
    torchs.MultiStepLR: ("milestones",),
    torchs.OneCycleLR: ("total_steps",),
    torchs.PolynomialLR: ("total_iters",),
    torchs.StepLR: ("step_size",),
}
"""The arguments that count scheduler steps."""
_EACH_STEP: dict[Any, tuple[str, ...]] = {torchs.ExponentialLR: ("gamma",), torchs.CyclicLR: ("gamma",)}
"""The arguments that are a factor of each scheduler step; elsewhere `gamma` belongs to a milestone."""


def lengths_of(target: Any) -> tuple[str, ...] | None:
    """The arguments of a scheduler class that count its steps; None: nobody knows them.

    torch's are in a table here, by the class itself, since a subclass may count otherwise; another class says it in an
    attribute `lengths`.
    """
    lengths: tuple[str, ...] | None = _LENGTHS.get(target, getattr(target, "lengths", None))
    return lengths


def fill_horizon(factory: functools.partial[Any], length: int) -> functools.partial[Any]:
    """The factory with every horizon that is null, or required and not given, set to `length`.

    A horizon that has a default of its own and is not mentioned keeps it, as does one with a number.

    Args:
        factory: of a torch scheduler, still without its optimizer.
        length: between the schedule's begin and end, in scheduler steps.
    """
    filled: dict[str, int] = {}
    for name, parameter in inspect.signature(factory.func).parameters.items():
        if name not in HORIZONS:
            continue
        required = parameter.default is inspect.Parameter.empty
        if (name in factory.keywords and factory.keywords[name] is None) or (required and name not in factory.keywords):
            filled[name] = length
    return functools.partial(factory, **filled)


def from_epochs(factory: functools.partial[Any], steps_per_epoch: int, key: str) -> functools.partial[Any]:
    """The factory of the same schedule in finer steps: MMEngine's `build_iter_from_epoch`.

    Args:
        factory: of a scheduler whose arguments count epochs, still without its optimizer.
        steps_per_epoch: optimizer steps of an epoch, 1 or more.
        key: the schedule's place in the config, for the error.

    Raises:
        UserError: nobody knows which arguments count epochs.
    """
    target = factory.func
    lengths = lengths_of(target)
    name = getattr(target, "__name__", str(target))
    if lengths is None or factory.args:
        raise UserError(
            f"which arguments of {name} count epochs is not known",
            key=f"{key}.convert_to_iter_based",
            remedy="Count optimizer steps yourself, with by_epoch=false. A class of your own can say it: "
            'lengths = ("step_size",).',
        )
    parameters = inspect.signature(target).parameters

    def given(argument: str) -> Any:
        return factory.keywords.get(argument, parameters[argument].default)

    changed: dict[str, Any] = {}
    for argument in lengths:
        value = given(argument)
        if isinstance(value, int):
            changed[argument] = value * steps_per_epoch
        elif value is not None and value is not inspect.Parameter.empty:
            changed[argument] = [epoch * steps_per_epoch for epoch in value]
    for argument in _EACH_STEP.get(target, ()):
        if given(argument) is not inspect.Parameter.empty:
            changed[argument] = given(argument) ** (1 / steps_per_epoch)
    return functools.partial(factory, **changed)
