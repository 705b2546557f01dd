"""Start without importing `torch._dynamo`, which takes 1.2 s and is only needed by a run that compiles.

Why this file exists: torch's optimizers import its compiler at their first step, even if nothing is compiled. When
torch no longer does that, tests/optim/test_avoid_dynamo.py fails, and this file can be removed.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch.optim import Optimizer

_DYNAMO = "torch._dynamo"
_MARK = "__dynamo_disable"
"""The attribute in which `torch._disable_dynamo` stores its wrapper of a function."""


def avoid_dynamo_import() -> None:
    """Keep optimizers from importing `torch._dynamo`. Call this before an optimizer is built.

    torch imports it at the first call of two kinds of functions, to exclude them from compilation:

    * `add_param_group`, `zero_grad`, `state_dict` and `load_state_dict` of `Optimizer` (`torch._disable_dynamo`),
    * `step` of the optimizers (`_use_grad_for_differentiable`, which also switches gradients off).

    Once something else has imported the module (`torch.compile`), these functions call torch's originals. Can be called
    twice. Nothing is changed if the module has been imported before, or if torch's functions are different ones.
    """
    if _DYNAMO in sys.modules:
        return
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        _keep_lazy(getattr(Optimizer, name, None))
    for optimizer in Optimizer.__subclasses__():  # torch's; AdamW inherits the step of Adam
        step: Any = vars(optimizer).get("step")
        # After the first object of a class, its step has a profiler's wrapper (`hooked`) and is left alone.
        if _is_wrapper(step, "torch.optim.optimizer", "_use_grad") and not hasattr(step, "hooked"):
            optimizer.step = _without_import(step)  # type: ignore[method-assign]  # that is the point


def _keep_lazy(method: Any) -> None:
    """Set the attribute that `torch._disable_dynamo` looks for before it imports."""
    if not _is_wrapper(method, "torch._compile", "inner") or _MARK not in method.__code__.co_consts:
        return
    function = method.__wrapped__
    if hasattr(function, _MARK):
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        if _DYNAMO in sys.modules:
            delattr(function, _MARK)
            return method(*args, **kwargs)  # stores torch's own wrapper
        return function(*args, **kwargs)

    setattr(function, _MARK, call)


def _without_import(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a `step` like torch's own wrapper, to be used until `torch._dynamo` is imported."""
    function = step.__wrapped__  # type: ignore[attr-defined]  # set by functools.wraps; checked before

    @functools.wraps(function)
    def call(self: Optimizer, *args: Any, **kwargs: Any) -> Any:
        if _DYNAMO in sys.modules:
            return step(self, *args, **kwargs)
        enabled = torch.is_grad_enabled()
        try:
            torch.set_grad_enabled(self.defaults["differentiable"])
            return function(self, *args, **kwargs)
        finally:
            torch.set_grad_enabled(enabled)

    return call


def _is_wrapper(function: Any, module: str, name: str) -> bool:
    """Return whether this is the closure `name` of `module`. Its `__name__` is that of the wrapped function."""
    code = getattr(function, "__code__", None)
    return (
        code is not None
        and code.co_name == name
        and function.__globals__.get("__name__") == module
        and callable(getattr(function, "__wrapped__", None))
    )
