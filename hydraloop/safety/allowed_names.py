"""What of hydraloop and of the libraries a config may name: the data behind the allowlist, with the reasons."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Iterable
from types import BuiltinFunctionType, FunctionType, ModuleType
from typing import Any

COMPONENTS = tuple(
    f"hydraloop.{package}" for package in ("hooks", "tasks", "data", "models", "optim", "tracking", "compat")
)
"""Of these, what `__all__` of the package names: the modules below have functions that read and write any file."""
WHOLE = ("torch.nn", "torch.optim", "torchmetrics")
"""Every class and function defined in them, with the exceptions below."""
REFUSED = (
    "torch.utils.data.datapipes",  # opens files, unpickles what it is given
    "torchmetrics.detection.helpers",  # reads and writes JSON files by name
    "torchmetrics.functional.image.arniqa",  # unpickles what it downloads
    "torchmetrics.image.arniqa",
    "torchmetrics.functional.multimodal.clip_score",  # executes the code of any model on a hub: trust_remote_code
    "torchmetrics.multimodal.clip_score",
    "torchmetrics.functional.multimodal.clip_iqa",  # loads any model on a hub or disk by its name, as the rest here
    "torchmetrics.multimodal.clip_iqa",
    "torchmetrics.functional.text.bert",
    "torchmetrics.text.bert",
    "torchmetrics.functional.text.infolm",
    "torchmetrics.text.infolm",
    "torchmetrics.functional.text.helper_embedding_metric",
)
PROFILER = (
    "ProfilerAction",
    "ProfilerActivity",
    "profile",
    "record_function",
    "schedule",
    "tensorboard_trace_handler",
)
"""Of torch.profiler; the rest has an observer that truncates the file it is given."""
LIBRARIES = (*WHOLE, "torch.utils.data", "torch.profiler")

_FUNCTIONAL = "torch.nn.functional"
_NATIVE_ORIGINS = (None, "torch", "torch._C._nn")
"""Where the functions of torch.nn.functional that are written in C++ say they are from."""
_DISPATCHED = "boolean_dispatch.<locals>.fn"
"""What torch.nn.functional.max_pool2d and the like are called."""
_Cached = type(functools.cache(len))


def within(name: str, packages: Iterable[str]) -> bool:
    """Whether it is one of the packages or in one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


def is_public(target: str) -> bool:
    """Whether a path lies in a component or library by its name, with no private part; says nothing of the object."""
    if not within(target, (*COMPONENTS, *LIBRARIES)) or within(target, REFUSED):
        return False
    return not any(part.startswith("_") for part in target.split("."))


def is_ours_or_a_library(found: Any, origin: str | None) -> bool:
    """Whether an object is one that a component package or a library offers, wherever it was found.

    Args:
        origin: the module it was defined in.
    """
    if origin is not None and within(origin, WHOLE):
        return not within(origin, REFUSED)
    return _is_exported(found) or _is_native(found, origin)


def is_constructor(found: Any, owner: Any) -> bool:
    """Whether it is a class, a classmethod, or a function of a module: what needs no object to be called on.

    Args:
        owner: what it was found in, a module or class.
    """
    if inspect.isclass(found):
        return isinstance(owner, type | ModuleType)
    if isinstance(owner, type):
        return inspect.ismethod(found) and _is_classmethod(found)
    if not isinstance(owner, ModuleType):
        return False
    if inspect.ismethod(found):
        return _is_classmethod(found)
    if isinstance(found, FunctionType):  # not a method under a name of its own
        return "." not in found.__qualname__.rpartition("<locals>.")[2]
    if isinstance(found, BuiltinFunctionType):
        return not _is_native_method(found)
    return isinstance(found, _Cached)


def _is_classmethod(method: Any) -> bool:
    kind = method.__self__
    return isinstance(kind, type) and any(
        isinstance(vars(base).get(method.__name__), classmethod) for base in kind.__mro__
    )


def _is_native_method(found: BuiltinFunctionType) -> bool:
    return not (found.__self__ is None or isinstance(found.__self__, type | ModuleType))


def _is_exported(found: Any) -> bool:
    name = getattr(found, "__name__", None)
    if not isinstance(name, str) or name.startswith("_"):
        return False
    for package in (*COMPONENTS, "torch.utils.data", "torch.profiler"):
        module = sys.modules.get(package)
        names = PROFILER if package == "torch.profiler" else getattr(module, "__all__", ())
        origin = getattr(found, "__module__", None) or ""
        if name in names and getattr(module, name) is found and not within(origin, REFUSED):
            return True
    return False


def _is_native(found: Any, origin: str | None) -> bool:
    """Whether it is a function of torch.nn.functional that is not written there in Python."""
    name = getattr(found, "__name__", "_")
    dispatched = isinstance(found, FunctionType) and found.__qualname__ == _DISPATCHED
    if not dispatched and not (isinstance(found, BuiltinFunctionType) and origin in _NATIVE_ORIGINS):
        return False
    functional = vars(sys.modules[_FUNCTIONAL]) if _FUNCTIONAL in sys.modules else {}
    if dispatched:
        return any(found is value for key, value in functional.items() if not key.startswith("_"))
    return not name.startswith("_") and functional.get(name) is found
