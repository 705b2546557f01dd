"""How long a schedule is, where its options leave that open."""

from __future__ import annotations

import functools
import inspect
from typing import Any

HORIZONS = ("T_max", "total_iters", "total_steps")
"""The arguments of torch's schedulers that mean "the whole length", in scheduler steps."""


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
