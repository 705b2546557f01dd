"""A custom formula of the average: a function of the number of updates, or of the average and the weights."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from hydraloop.errors import UserError
from hydraloop.hooks.ema.averaging import AveragedTensors


class CustomFormula:
    """A function in one of three forms, told apart by its number of required arguments.

    * `function(updates)` returns the share of the new weights, 0 .. 1. `updates` is the number of updates done, at
      least 1, because the first one is a copy.
    * `function(average, weights)` or `function(average, weights, updates)` is called for each floating-point tensor,
      or this rank's shard of it, without gradients. Both tensors are float32 or wider. It returns the new average, or
      changes `average` in place and returns None.

    Args:
        function: any of these forms.

    Raises:
        UserError: the object is not one of these functions.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._arguments = _required(function)
        if self._arguments not in (1, 2, 3):
            raise UserError(
                f"{_name(function)} takes {self._arguments} arguments",
                key="weight",
                remedy="Let it take (updates), (average, weights) or (average, weights, updates). If it returns such a "
                "function, add _partial_: false.",
            )

    def update(self, averaged: AveragedTensors, updates: int, *, key: str) -> None:
        """Move the averages. No host sync of its own.

        Args:
            averaged: the averages.
            updates: updates done, at least 1.
            key: of the option, for the error.

        Raises:
            UserError: the share is not a number from 0 to 1.
        """
        if self._arguments == 3:
            averaged.replace(lambda average, weights: self._function(average, weights, updates))
            return
        if self._arguments == 2:
            averaged.replace(self._function)
            return
        share = self._function(updates)
        if not isinstance(share, int | float) or not 0 <= share <= 1:
            raise UserError(
                f"{_name(self._function)}({updates}) is {share!r}, not a share from 0 to 1",
                key=key,
                remedy="Return the share of the new weights, as a number.",
            )
        averaged.update(share)


def _required(function: Callable[..., Any]) -> int:
    """Return the number of positional arguments without a default; 0 if it is not known."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        return 0
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(one.kind in positional and one.default is one.empty for one in parameters)


def _name(function: Any) -> str:
    function = getattr(function, "func", function)  # of a partial
    return str(getattr(function, "__name__", type(function).__name__))
