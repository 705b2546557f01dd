"""Apply the allowlist to what Hydra itself makes or imports: callbacks, launcher, sweeper, log handlers, search path.

The written text is checked, not its resolved value: `${now:}` and others have another value in the run.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, ListConfig, OmegaConf

from hydraloop.cli.arguments import parse
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
"""Hydra's own classes. Other plugins have options that run code: submitit's `setup`, optuna's
`custom_search_space`. PickleJobInfoCallback writes the config with its secrets into a pickle file."""
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

_SEARCH_PATH = "hydra.searchpath"
_HYDRAS_CONFIGS = "hydra.conf"
_ENVIRONMENT = re.compile(r"\$\{oc\.env:\w+\}")
_SCHEMES = ("pkg", "structured")
"""These are followed by the name of a module, which Hydra imports."""


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
            refused = _interpolates(value, anywhere=swept or name == "_target_") and key not in typed
            if refused and not _is_job_name(key, value, hydra.get("job")):
                raise _not_written(key)
            if name == "_target_":
                _check_target(value, key)
    _check_shapes(hydra)
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


def _check_shapes(hydra: dict[str, Any]) -> None:
    """Refuse values at which Hydra would fail with an assertion or without a key."""
    verbose = hydra.get("verbose", False)
    names = verbose if isinstance(verbose, list) else [verbose]
    if not isinstance(verbose, bool) and not all(isinstance(name, str) for name in names):
        remedy = "Use true, false or names of loggers: hydra.verbose=[hydraloop]"
        raise UserError(f"{verbose!r} does not name loggers", key="hydra.verbose", remedy=remedy)
    for name, node in (hydra.get("callbacks") or {}).items():
        if node is not None and not isinstance(node, dict):
            key = f"hydra.callbacks.{name}"
            raise UserError(f"{node!r} is not a callback", key=key, remedy=f"Name a class: +{key}._target_=…")


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


def _is_job_name(key: str, value: Any, job: Any) -> bool:
    """Return whether a value is the name that submitit's launcher gives its jobs, and is a text as it is written."""
    is_text = isinstance(job, dict) and "${" not in str(job.get("name"))
    return key == "hydra.launcher.name" and value == "${hydra.job.name}" and is_text


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


def check_search_path(name: str, overrides: Sequence[str]) -> None:
    """Refuse packages that are not trusted, before Hydra composes with them. A composer has to be open.

    Args:
        name: of the primary config, the only one in which Hydra reads `hydra.searchpath`.
    """
    found = [_in_primary(name)]
    found += [override.value() for override in parse(overrides) if override.key_or_group == _SEARCH_PATH]
    for entries in found:
        for entry in entries if isinstance(entries, list | ListConfig) else [entries]:
            if isinstance(entry, str):  # Hydra refuses anything else
                _check_entry(entry)


def _in_primary(name: str) -> object:
    for source in GlobalHydra.instance().config_loader().get_sources():
        if source.is_config(name):
            config = source.load_config(name).config
            if not isinstance(config, DictConfig):
                return None
            raw = _written(config)
            if "${" in _ENVIRONMENT.sub("", raw):
                raise UserError(
                    "an interpolation is refused here, because it can become a package that was not checked",
                    key=_SEARCH_PATH,
                    remedy="Write the folder itself, or use ${oc.env:NAME}.",
                )
            return OmegaConf.select(config, _SEARCH_PATH)
    return None


def _written(config: DictConfig) -> str:
    """Return `hydra.searchpath` as written; all of `hydra` if that is an interpolation."""
    hydra = OmegaConf.to_container(config, resolve=False)
    hydra = hydra.get("hydra") if isinstance(hydra, dict) else None
    return str(hydra.get("searchpath") if isinstance(hydra, dict) else hydra)


def _check_entry(entry: str) -> None:
    scheme, separator, rest = entry.partition("://")
    if not separator or scheme == "file":
        return
    module = rest.replace("/", ".").rstrip(".")
    if scheme not in _SCHEMES:
        raise UserError(
            f"{entry} is not a folder", key=_SEARCH_PATH, remedy="Name a folder, or a package: pkg://package.conf"
        )
    if module != _HYDRAS_CONFIGS and not ALLOWLIST.may_import(module):
        raise UserError(
            f"Hydra would import {module} to look for config files in it",
            key=_SEARCH_PATH,
            remedy=f"Name its folder instead, or, if you trust it, {ALLOWLIST.remedy(module.split('.')[0])}",
        )
