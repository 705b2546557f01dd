"""A start without `torch._dynamo`, whose import takes 1.2 s and is of no use to a run that compiles nothing."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

_DYNAMO = "torch._dynamo"
_MARK = "__dynamo_disable"
"""The attribute in which `torch._disable_dynamo` keeps what it made of a function."""


def avoid_dynamo_import() -> None:
    """Let optimizers import `torch._dynamo` only if something else did. Call it before an optimizer is built.

    torch imports it at the first call of two kinds of functions, only to tell the compiler to keep out of them:

    * `add_param_group`, `zero_grad`, `state_dict` and `load_state_dict` of `Optimizer` (`torch._disable_dynamo`),
    * `step` of the optimizers (`_use_grad_for_differentiable`, which also switches gradients off).

    Without the module nothing is being compiled and there is nothing to tell. Once it is there (`torch.compile`), these
    functions do what torch's do. Safe to call twice. Where torch is built differently from what is described
    here, or has the module already, nothing is changed.
    """
    if _DYNAMO in sys.modules:
        return
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        _keep_lazy(getattr(Optimizer, name, None))
    for optimizer in _subclasses(Optimizer):
        step: Any = vars(optimizer).get("step")
        # An optimizer class of which an object was built has a profiler's wrapper around its step, for good.
        if _is_wrapper(step, "torch.optim.optimizer", "_use_grad") and not hasattr(step, "hooked"):
            optimizer.step = _without_import(step)  # type: ignore[method-assign]  # that is the point


def _keep_lazy(method: Any) -> None:
    """Give a method of `torch._disable_dynamo` what that looks for before it imports."""
    if not _is_wrapper(method, "torch._compile", "inner") or _MARK not in method.__code__.co_consts:
        return
    function = method.__wrapped__
    if hasattr(function, _MARK):
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        if _DYNAMO in sys.modules:
            delattr(function, _MARK)
            return method(*args, **kwargs)  # which now does, and keeps, the real thing
        return function(*args, **kwargs)

    setattr(function, _MARK, call)


def _without_import(step: Callable[..., Any]) -> Callable[..., Any]:
    """A `step` like torch's own wrapper, for as long as `torch._dynamo` is not there."""
    function = step.__wrapped__  # type: ignore[attr-defined]  # functools.wraps sets it, as was looked at before

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
    """Whether this is the closure `name` made in `module`; its own names are those of what it wraps."""
    code = getattr(function, "__code__", None)
    return (
        code is not None
        and code.co_name == name
        and function.__globals__.get("__name__") == module
        and callable(getattr(function, "__wrapped__", None))
    )


def _subclasses(cls: type[Optimizer]) -> Iterator[type[Optimizer]]:
    for subclass in cls.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
