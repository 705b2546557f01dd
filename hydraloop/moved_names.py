"""Earlier names of classes, which old configs still use in `_target_`."""

from __future__ import annotations

import importlib
from typing import Any

MOVED = {
    "hydraloop.data.Augmented": "hydraloop.examples.Augmented",
    "hydraloop.data.Diabetes": "hydraloop.examples.Diabetes",
    "hydraloop.data.Digits": "hydraloop.examples.Digits",
    "hydraloop.data.Loader": "hydraloop.data.GlobalBatchLoader",
    "hydraloop.data.PythonSources": "hydraloop.examples.PythonSources",
    "hydraloop.models.GPT": "hydraloop.examples.GPT",
}
"""The name of each class now, by its earlier name."""


def with_present_names(value: Any) -> Any:
    """Return a plain config in which each earlier name is replaced by the present one."""
    if isinstance(value, dict):
        return {key: with_present_names(item) for key, item in value.items()}
    if isinstance(value, list):
        return [with_present_names(item) for item in value]
    return MOVED.get(value, value) if isinstance(value, str) else value


def find_moved(package: str, name: str) -> Any:
    """Return a class by its earlier name in a package; called by the package's `__getattr__`.

    Raises:
        AttributeError: there is no such earlier name.
    """
    now = MOVED.get(f"{package}.{name}")
    if now is None:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    module, _, current = now.rpartition(".")
    return getattr(importlib.import_module(module), current)
