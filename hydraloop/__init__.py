"""hydraloop: train PyTorch models with hooks chosen, ordered and swept by Hydra.

`main` is the command line, `compose` and `build` are the same from Python::

    engine = hydraloop.build(hydraloop.compose(["hooks=[ema]"]))
    engine.train()

`load` returns the engine of a finished run, and `records` the numbers that a run has logged. Importing this package
registers every built-in option with Hydra; torch is imported when `build`, `load`, `Engine` or a task is used.
"""

import sys  # is built in

# `python -m hydraloop` puts the working directory first, perhaps an unpacked archive with a hydra.py or typing.py.
if sys.argv[:1] == ["-m"] and not sys.flags.safe_path:
    _module = sys.orig_argv[len(sys.orig_argv) - len(sys.argv)]  # the last argument of Python itself
    if _module in ("hydraloop", "-mhydraloop"):
        del sys.path[0]

import importlib
from typing import TYPE_CHECKING, Any

from hydraloop.importing import deferred as _deferred

with _deferred():
    from hydraloop.engine.hook import Hook, Priority
    from hydraloop.errors import UserError
    from hydraloop.schemas import register as _register

    _register()

if TYPE_CHECKING:
    from hydraloop.commands.command_line import main as main
    from hydraloop.engine.engine import Engine as Engine
    from hydraloop.launch.python_interface import build as build
    from hydraloop.launch.python_interface import compose as compose
    from hydraloop.launch.python_interface import load as load
    from hydraloop.launch.python_interface import records as records
    from hydraloop.tasks import Task as Task

__version__ = "0.1.0"

_LAZY = {
    "Engine": "hydraloop.engine.engine",
    "Task": "hydraloop.tasks",
    "build": "hydraloop.launch.python_interface",
    "compose": "hydraloop.launch.python_interface",
    "load": "hydraloop.launch.python_interface",
    "main": "hydraloop.commands.command_line",
    "records": "hydraloop.launch.python_interface",
}
__all__ = ["Engine", "Hook", "Priority", "Task", "UserError", "build", "compose", "load", "main", "records"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with _deferred():
        return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return __all__
