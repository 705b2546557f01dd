"""hydraloop: train PyTorch models with hooks chosen, ordered and swept by Hydra.

`main` is the command line, `compose` and `build` are the same from Python::

    engine = hydraloop.build(hydraloop.compose(["hooks=[ema]"]))
    engine.train()

Importing this registers every built-in option with Hydra; torch is imported when `build`, `Engine` or a task is used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hydraloop.engine.hook import Hook, Priority
from hydraloop.errors import UserError
from hydraloop.schemas import register as _register

if TYPE_CHECKING:
    from hydraloop.app import main as main
    from hydraloop.builder import build as build
    from hydraloop.cli.notebook import compose as compose
    from hydraloop.engine.engine import Engine as Engine
    from hydraloop.tasks import Task as Task

__version__ = "0.1.0"

_LAZY = {
    "Engine": "hydraloop.engine.engine",
    "Task": "hydraloop.tasks",
    "build": "hydraloop.builder",
    "compose": "hydraloop.cli.notebook",
    "main": "hydraloop.app",
}
__all__ = ["Engine", "Hook", "Priority", "Task", "UserError", "build", "compose", "main"]

_register()


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
