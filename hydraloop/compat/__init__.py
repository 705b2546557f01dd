"""Adapters for hooks of other frameworks: objects of MMEngine and Lightning in a run of hydraloop.

Neither framework is imported here: their objects come with the user. Names are imported when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydraloop.compat.lightning_callback import LightningCallback as LightningCallback
    from hydraloop.compat.mmengine_hook import MMEngineHook as MMEngineHook

_FILES = {"LightningCallback": "lightning_callback", "MMEngineHook": "mmengine_hook"}
__all__ = sorted(_FILES)


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
