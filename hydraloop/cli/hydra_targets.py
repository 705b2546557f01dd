"""Apply the allowlist to what Hydra itself makes from a config: callbacks, launcher, sweeper and log handlers.

The written text is checked, not its resolved value: `${now:}` and others have another value in the run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hydraloop.cli.config_file_limits import check_file
from hydraloop.errors import UserError
from hydraloop.safety import hydra_versions
from hydraloop.safety.allowlist import ALLOWLIST

_MADE = ("callbacks", "launcher", "sweeper")
_LOGGING = ("job_logging", "hydra_logging")
_PLUGINS = "hydra._internal.core_plugins"
_OF_HYDRA = (
    f"{_PLUGINS}.basic_launcher.BasicLauncher",
    f"{_PLUGINS}.basic_sweeper.BasicSweeper",
    "hydra.experimental.callbacks.LogJobReturnCallback",
)
"""Hydra's own classes. Other plugins have options that run code: submitit's `setup`, optuna's `custom_search_space`.
PickleJobInfoCallback writes the config with its secrets into a pickle file."""
_FACTORIES = ("()", "class", "factory", "queue", "listener")
"""Keys of a logging section whose value Python imports and calls."""
_ATTRIBUTES = "."
"""Key of the attributes that Python sets on a handler after it is made, such as its file name."""
_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
_WHOLE = re.compile(r"\s*\$\{.*\}\s*", re.DOTALL)
"""An interpolation that can become a section; with other text around it, it stays text."""
_LOG_CLASSES = {
    "formatters": (
        "hydraloop.cli.console.MaskingFormatter",
        *(f"colorlog.{name}" for name in ("ColoredFormatter", "LevelFormatter", "TTYColoredFormatter")),
        "colorlog.formatter.ColoredFormatter",
    ),
    "filters": ("logging.Filter",),
    "handlers": (
        "hydraloop.cli.console.ConsoleHandler",
        *(f"logging.{name}" for name in ("StreamHandler", "FileHandler", "NullHandler")),
        *(f"logging.handlers.{name}Handler" for name in ("RotatingFile", "TimedRotatingFile", "WatchedFile", "Memory")),
    ),
}
"""By section, because a handler that is named as a formatter takes the text of `format` for a file name.
Handlers that send records to another machine must be trusted."""


def check_hydra(cfg: DictConfig, typed: Collection[str] = ()) -> None:
    """Refuse classes that Hydra would import and call, unless they are Hydra's own or on the allowlist.

    Args:
        typed: keys that the command line sets. They may name log files anywhere, and use interpolations.
    """
    raw: Any = OmegaConf.to_container(cfg, resolve=False)
    hydra = raw.get("hydra") or {}
    if not isinstance(hydra, dict):
        raise _not_written("hydra")
    for section in _MADE:
        for key, name, value in _leaves(hydra.get(section), f"hydra.{section}", section):
            swept = key.startswith("hydra.sweeper.params.")  # these become overrides
            if key not in typed and _interpolates(value, anywhere=swept or name == "_target_"):
                raise _not_written(key)
            if name == "_target_":
                _check_target(value, key)
    for section in _LOGGING:
        for key, name, value in _leaves(hydra.get(section), f"hydra.{section}", section):
            if name == "filename":
                if key not in typed:
                    check_file(value, key, hydra.get("job"))
            elif name == _ATTRIBUTES:
                raise UserError("attributes of a handler are refused", key=key, remedy="Leave it out.")
            elif key not in typed and _interpolates(value, anywhere=True):
                raise _not_written(key)
            elif name in _FACTORIES:
                _check_factory(value, key)
            elif str(value).startswith(("ext://", "cfg://")) and value not in _STREAMS:
                raise UserError(f"{value} is refused", key=key, remedy=f"Use {' or '.join(_STREAMS)}.")


def _leaves(node: Any, key: str, name: str) -> Iterator[tuple[str, str, Any]]:
    """Yield (key, last part of the key, value as written) of each value in a container, except inside `.`."""
    if isinstance(node, dict) and name != _ATTRIBUTES:
        for inner, value in node.items():
            yield from _leaves(value, f"{key}.{inner!s}", str(inner))
    elif isinstance(node, list):
        for index, value in enumerate(node):
            yield from _leaves(value, f"{key}[{index}]", name)
    elif node is not None:
        yield key, name, node


def _interpolates(value: Any, *, anywhere: bool) -> bool:
    """Return whether a value is an interpolation, which may become a section, or (`anywhere`) has one in it."""
    return isinstance(value, str) and "${" in value and (anywhere or _WHOLE.fullmatch(value) is not None)


def _not_written(key: str) -> UserError:
    return UserError(
        "an interpolation is refused here, because it can become a target or a file that was not checked",
        key=key,
        remedy=f"In a config file, write the value itself, or type it on the command line: {key}=…",
    )


def _check_target(target: Any, key: str) -> None:
    if not isinstance(target, str):
        raise UserError(f"{target!r} is not the path of a class", key=key, remedy="Write package.module.Class.")
    if target not in _OF_HYDRA:
        hydra_versions.allow(target, ALLOWLIST.locate(target, key.removesuffix("._target_")))


def _check_factory(target: Any, key: str) -> None:
    if not isinstance(target, str) or ":" in target:
        raise UserError(
            f"{target!r} is not the path of a class", key=key, remedy="Write logging.FileHandler or similar."
        )
    section = "formatters" if ".formatters." in key else "filters" if ".filters" in key else "handlers"
    if target not in _LOG_CLASSES[section]:
        try:
            hydra_versions.allow(target, ALLOWLIST.locate(target, key))
        except UserError as error:
            raise UserError(error.problem, key=key, remedy=error.remedy) from error
