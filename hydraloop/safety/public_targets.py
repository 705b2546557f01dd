"""The classes and functions of hydraloop, torch and torchmetrics that a config may name in `_target_`."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

COMPONENTS = tuple(f"hydraloop.{package}" for package in ("hooks", "tasks", "data", "models", "optim", "tracking"))
"""Allowed is what `__all__` of these packages names. Other functions in them read and write any file."""
WHOLE = ("torch.nn", "torch.optim", "torchmetrics")
"""Every class and function that is defined in these is allowed, except in REFUSED."""
REFUSED = (
    "torch.utils.data.datapipes",  # opens files, unpickles what it is given
    "torchmetrics.detection.helpers",  # reads and writes JSON files by name
    "torchmetrics.functional.image.arniqa",  # unpickles what it downloads
    "torchmetrics.image.arniqa",
    "torchmetrics.functional.multimodal.clip_score",  # executes the code of any model on a hub: trust_remote_code
    "torchmetrics.multimodal.clip_score",
    "torchmetrics.functional.multimodal.clip_iqa",  # loads any model on a hub or disk by name, as the rest do
    "torchmetrics.multimodal.clip_iqa",
    "torchmetrics.functional.text.bert",
    "torchmetrics.text.bert",
    "torchmetrics.functional.text.infolm",
    "torchmetrics.text.infolm",
    "torchmetrics.functional.text.helper_embedding_metric",
)
PROFILER = ("ProfilerAction", "ProfilerActivity", "profile", "record_function", "schedule")
"""Allowed in torch.profiler, which also has a handler and an observer that write to any folder."""
LIBRARIES = (*WHOLE, "torch.utils.data", "torch.profiler")
PACKAGES = (*COMPONENTS, *LIBRARIES)

_CACHED = type(functools.cache(len))


def within(name: str, packages: Iterable[str]) -> bool:
    """Return whether a dotted name is one of the packages or inside one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def is_public(target: str) -> bool:
    """Return whether a dotted name is in an allowed package and has no private part. The object is not checked."""
    private = any(part.startswith("_") for part in target.split("."))
    return within(target, PACKAGES) and not within(target, REFUSED) and not private


def is_offered(obj: Any, origin: str | None) -> bool:
    """Return whether an object is one that a component or library offers, even if another module has it, too.

    Args:
        origin: the module in which it was defined.
    """
    if origin is not None and within(origin, WHOLE):
        return not within(origin, REFUSED)
    return _is_exported(obj) or _is_functional(obj, origin)


def needs_no_object(obj: Any, owner: Any) -> bool:
    """Return whether it is a class, a classmethod or a function of a module, which no object is needed to call.

    Args:
        owner: the module or class that has it.
    """
    if inspect.isclass(obj):
        return isinstance(owner, type | ModuleType)
    if inspect.ismethod(obj):
        bases = obj.__self__.__mro__ if isinstance(obj.__self__, type) else ()
        is_classmethod = any(isinstance(vars(base).get(obj.__name__), classmethod) for base in bases)
        return isinstance(owner, type | ModuleType) and is_classmethod
    if not isinstance(owner, ModuleType):
        return False
    if isinstance(obj, FunctionType):  # and not a method with another name
        return "." not in obj.__qualname__.rpartition("<locals>.")[2]
    if isinstance(obj, BuiltinFunctionType):
        return obj.__self__ is None or isinstance(obj.__self__, type | ModuleType)
    return isinstance(obj, _CACHED)


def _is_exported(obj: Any) -> bool:
    name, origin = getattr(obj, "__name__", None), getattr(obj, "__module__", None) or ""
    if not isinstance(name, str) or name.startswith("_") or within(origin, REFUSED):
        return False
    for package in (*COMPONENTS, "torch.utils.data", "torch.profiler"):
        module = sys.modules.get(package)
        names = PROFILER if package == "torch.profiler" else getattr(module, "__all__", ())
        if name in names and getattr(module, name) is obj:
            return True
    return False


def _is_functional(obj: Any, origin: str | None) -> bool:
    """Return whether it is a function of torch.nn.functional that is written in C++ or made by `boolean_dispatch`."""
    native = isinstance(obj, BuiltinFunctionType) and origin in (None, "torch", "torch._C._nn")
    dispatched = isinstance(obj, FunctionType) and obj.__qualname__ == "boolean_dispatch.<locals>.fn"
    if not (native or dispatched) or "torch.nn.functional" not in sys.modules:
        return False
    functional = vars(sys.modules["torch.nn.functional"])
    return any(obj is value for name, value in functional.items() if not name.startswith("_"))
