"""What Hydra itself makes from a config (callbacks, launcher, sweeper, log handlers): behind the allowlist, too."""

from __future__ import annotations

import importlib
import logging
import logging.handlers
import re
import sys
from collections.abc import Collection, Iterator
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydraloop.allowed import within
from hydraloop.allowlist import ALLOWLIST
from hydraloop.cli.composing import hydra_config
from hydraloop.cli.limits import check_file
from hydraloop.errors import UserError

_MADE = ("callbacks", "launcher", "sweeper")
_LOGGING = ("job_logging", "hydra_logging")
_PLUGINS = ("hydra._internal.core_plugins", "hydra.experimental.callbacks", "hydra_plugins.hydraloop")
"""Those of others have options that run code: submitit's `setup`, optuna's `custom_search_space`."""
"""Packages of Hydra's own classes and of its plugins; Hydra has no public name for the first."""
_FACTORIES = ("()", "class", "factory", "queue", "listener")
"""Keys of a logging section whose value Python imports and calls."""
_FILENAME = "filename"
"""Key of a handler's file."""
_ATTRIBUTES = "."
"""Key of what Python sets on a handler after it is made; its file name is an attribute."""
_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
_LOG_CLASSES = (
    "hydraloop.cli.console.ConsoleHandler",
    "hydraloop.cli.console.MaskingFormatter",
    *(f"colorlog.{name}" for name in ("ColoredFormatter", "LevelFormatter", "TTYColoredFormatter")),
    "colorlog.formatter.ColoredFormatter",
)
_UNKNOWN = object()
_SET_BY_HYDRA = re.compile(r"\$\{hydra[.:](runtime|job|run|sweep)\.\w+\}")
"""The start of a value known only once Hydra runs, `${hydra.runtime.output_dir}/train.log`."""


def check_hydra(cfg: DictConfig, typed: Collection[str] = ()) -> None:
    """Refuse what Hydra would import and call on its own, unless it is Hydra's, or the allowlist has it.

    Args:
        typed: keys that the command line sets, which may name log files anywhere.

    Raises:
        UserError: names the key.
    """
    if "hydra" not in cfg:
        return
    with hydra_config(cfg):
        for section in (*_MADE, *_LOGGING):
            if section not in cfg.hydra and not OmegaConf.is_interpolation(cfg.hydra, section):
                continue
            for key, node, name, value in _values(cfg.hydra, section, "hydra"):
                if name in _FACTORIES and section in _LOGGING:
                    _check_factory(value, key)
                elif name == _FILENAME and section in _LOGGING:
                    if key not in typed:
                        check_file(node, name, key, endings=(".log",))
                elif name == _ATTRIBUTES and section in _LOGGING:
                    raise UserError("attributes of a handler are refused", key=key, remedy="Leave it out.")
                elif name == "_target_":
                    _check_target(value, key)
                elif value is _UNKNOWN:
                    raise UserError("does not resolve before the run", key=key, remedy="Write the value itself.")
                elif section in _LOGGING and str(value).startswith("ext://") and value not in _STREAMS:
                    raise UserError(f"{value} is refused", key=key, remedy=f"Use {' or '.join(_STREAMS)}.")


def _check_target(target: Any, key: str) -> None:
    if not isinstance(target, str):
        raise UserError("is not the path of a class", key=key, remedy="Write package.module.Class.")
    if not _is_plugin(target):
        ALLOWLIST.locate(target, key.removesuffix("._target_"))


def _is_plugin(target: str) -> bool:
    """Whether it is a class of Hydra's own or of hydraloop's plugins, in the module that defines it."""
    module, _, name = target.rpartition(".")
    if not within(module, _PLUGINS):
        return False
    try:
        found = getattr(importlib.import_module(module), name, None)
    except ImportError:
        return False
    return isinstance(found, type) and within(found.__module__, _PLUGINS)


def _check_factory(target: Any, key: str) -> None:
    if not isinstance(target, str) or ":" in target:
        raise UserError("is not the path of a class", key=key, remedy="Write logging.FileHandler, or the like.")
    if not _is_log_class(target):
        try:
            ALLOWLIST.locate(target, key)
        except UserError as error:
            raise UserError(error.problem, key=key, remedy=error.remedy) from error


def _is_log_class(target: str) -> bool:
    """Whether it is a handler, formatter or filter of the standard library, or one of ours or colorlog's."""
    module, _, name = target.rpartition(".")
    if module not in ("logging", "logging.handlers"):
        return target in _LOG_CLASSES
    found = getattr(sys.modules[module], name, None)
    return isinstance(found, type) and issubclass(found, logging.Handler | logging.Formatter | logging.Filter)


def _values(node: Any, name: Any, prefix: str) -> Iterator[tuple[str, Any, str, Any]]:
    """(key, node above it, last part of the key, value) of each value at and under `node[name]`.

    The value is `_UNKNOWN` if only a run knows it. That of a file name is not resolved, and `.` is not looked into.
    """
    key = f"{prefix}[{name}]" if isinstance(node, ListConfig) else f"{prefix}.{name}"
    value = _resolved(node, name)
    if isinstance(value, DictConfig) and name != _ATTRIBUTES:
        for inner in value:
            yield from _values(value, inner, key)
    elif isinstance(value, ListConfig):
        for index in range(len(value)):
            yield from _values(value, index, key)
    elif value is not None:
        yield key, node, str(name), value


def _resolved(node: Any, name: Any) -> Any:
    called = name in (*_FACTORIES, "_target_")
    raw: Any = OmegaConf.to_container(node, resolve=False)
    if name == _FILENAME and OmegaConf.is_interpolation(node, name):
        return raw[name]
    if OmegaConf.is_missing(node, name):
        return _UNKNOWN if called else None
    try:
        return node[name]
    except OmegaConfBaseException:
        # Hydra fills some in: a path or a number, in text.
        return None if not called and _SET_BY_HYDRA.match(str(raw[name])) else _UNKNOWN
