"""The differences between Hydra 1.3 and 1.4."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, cast

import hydra
from hydra.core.utils import configure_log as hydra_configure_log
from hydra.utils import instantiate as hydra_instantiate
from omegaconf import DictConfig, OmegaConf

from hydraloop.errors import UserError


def is_1_3(version: str) -> bool:
    """Return whether a version of Hydra has the interface of 1.3; a release candidate of 1.4 has that of 1.4."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) < (1, 4)


IS_1_3 = is_1_3(hydra.__version__)


BASE: dict[str, Any] = {"version_base": "1.3"} if IS_1_3 else {}
"""An argument of every function that starts Hydra; 1.4 has removed it."""

HARMLESS = (
    "hydra.experimental.callbacks.LogJobReturnCallback",
    "hydraloop.cli.console.ConsoleHandler",
    "hydraloop.cli.console.MaskingFormatter",
    *(f"colorlog.{name}" for name in ("ColoredFormatter", "LevelFormatter", "TTYColoredFormatter")),
    "colorlog.formatter.ColoredFormatter",
    "logging.Filter",
    *(f"logging.{name}" for name in ("StreamHandler", "FileHandler", "NullHandler")),
    *(f"logging.handlers.{name}Handler" for name in ("RotatingFile", "TimedRotatingFile", "WatchedFile", "Memory")),
)
"""Classes that Hydra's own sections may name: those of Hydra and of hydraloop, and log handlers that only write files.

PickleJobInfoCallback writes the config with its secrets into a pickle file."""
_CHECKED: set[str] = set()
"""Callbacks and log handlers in Hydra's own sections that have passed the allowlist."""


def allow(target: str, found: Any) -> None:
    """Let Hydra 1.4 make an object that has passed the allowlist.

    Args:
        target: its path in the config.
        found: the class.
    """
    _CHECKED.update((target, f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', target)}"))


def main_options() -> dict[str, Any]:
    """Return keyword arguments of `hydra.main`. 1.4 also needs the classes that Hydra's own sections may name."""
    return {**BASE, **_whitelist()}


def _whitelist() -> dict[str, Any]:
    return {} if IS_1_3 else {"execution_whitelist": [*HARMLESS, *_CHECKED]}


def allowing() -> AbstractContextManager[Any]:
    """In the body, Hydra 1.4 makes what Hydra's own sections name."""
    return nullcontext() if IS_1_3 else cast(Any, hydra.utils).execution_whitelist([*HARMLESS, *_CHECKED])


def prepared(node: Any) -> Any:
    """Return a copy of a node for `instantiate`, which may be changed."""
    node = copy.deepcopy(node)  # keeps the parent, for interpolations
    OmegaConf.set_readonly(node, False)
    OmegaConf.set_struct(node, False)
    node._convert_ = "all"  # with it as an argument, 1.3 is slower, and 1.4 takes the node without our changes
    return node


def instantiate(node: Any, allowed: Sequence[str]) -> Any:
    """Call `hydra.utils.instantiate`, with plain lists and dicts as arguments.

    Args:
        allowed: the targets in `node`, which have passed the allowlist. 1.4 allows no others.
    """
    if node.get("_convert_") != "all":
        node = prepared(node)
    return hydra_instantiate(node, **({} if IS_1_3 else {"_execution_whitelist_": list(allowed)}))


def failed_at(error: Exception) -> str | None:
    """Return the key of the node that `instantiate` could not build; None if the error does not say.

    Hydra 1.3 raises another error, whose cause is that of the constructor. 1.4 adds a note to the constructor's.
    """
    found = re.search(r"full_key: (\S+)", "\n".join([str(error), *getattr(error, "__notes__", [])]))
    return found.group(1) if found else None


def configure_log(config: DictConfig | None, verbose: bool | str | list[str]) -> None:
    """Set up logging as Hydra does for a job.

    Args:
        config: `hydra.job_logging`; None: Hydra's default.
        verbose: `hydra.verbose`.

    Raises:
        UserError: Python's logging refuses the config.
    """
    listed = OmegaConf.create(verbose) if isinstance(verbose, list) else verbose
    with log_configured():
        hydra_configure_log(cast(Any, config), listed, **_whitelist())


@contextmanager
def log_configured() -> Iterator[None]:
    """Raise an error of Python's logging about its config as the user's mistake."""
    try:
        yield
    except ValueError as error:
        if not str(error).startswith(("Unable to configure ", "Unsupported version")):
            raise
        cause = "" if error.__cause__ is None else f": {error.__cause__}"
        remedy = "Change it there or in hydra.hydra_logging, or leave it out."
        raise UserError(f"{error}{cause}", key="hydra.job_logging", remedy=remedy) from error


def register_resolver(name: str, resolver: Callable[[], str]) -> None:
    """Register a resolver that has one value in a config. OmegaConf 2.4 has renamed the function."""
    register: Any = OmegaConf.register_new_resolver if IS_1_3 else OmegaConf.register_resolver
    register(name, resolver, use_cache=True, replace=True)
