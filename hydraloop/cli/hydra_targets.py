"""Apply the allowlist to what Hydra itself makes or imports: callbacks, log handlers, search path.

A config file cannot set these (`config_file_limits.py`), except with `hydraloop.main(hydra_sections=True)`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, ListConfig, OmegaConf

from hydraloop.cli.arguments import parse
from hydraloop.cli.config_file_limits import leaves, written
from hydraloop.errors import UserError
from hydraloop.safety import hydra_versions
from hydraloop.safety.allowlist import ALLOWLIST

_FACTORIES = ("()", "class", "factory", "queue", "listener")
_CLASS_KEYS = {
    "callbacks": ("_target_",),
    "job_logging": _FACTORIES,
    "hydra_logging": _FACTORIES,
}
"""By section: the keys whose value is imported and called, by Hydra or by Python's logging."""
_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")

_SEARCH_PATH = "hydra.searchpath"
_HYDRAS_CONFIGS = "hydra.conf"
_ENVIRONMENT = re.compile(r"\$\{oc\.env:\w+\}")
_SCHEMES = ("pkg", "structured")
"""These are followed by the name of a module, which Hydra imports."""


def check_targets(hydra: Any) -> None:
    """Refuse classes that Hydra or Python's logging would call, unless they are harmless or on the allowlist.

    Args:
        hydra: the node, as written. A typed interpolation is not followed.
    """
    if not isinstance(hydra, dict):
        return
    for section, names in _CLASS_KEYS.items():
        for key, value in leaves(hydra.get(section), f"hydra.{section}"):
            if key.rpartition(".")[2] in names and value is not None:
                _check_class(value, key)
            elif "_logging" in section and str(value).startswith(("ext://", "cfg://")) and value not in _STREAMS:
                raise UserError(f"{value} is refused", key=key, remedy=f"Use {' or '.join(_STREAMS)}.")
    _check_shapes(hydra)


def _check_shapes(hydra: dict[str, Any]) -> None:
    """Refuse values at which Hydra would fail with an assertion or without a key."""
    verbose = hydra.get("verbose", False)
    names = verbose if isinstance(verbose, list) else [verbose]
    if not isinstance(verbose, bool) and not all(isinstance(name, str) for name in names):
        remedy = "Use true, false or names of loggers: hydra.verbose=[hydraloop]"
        raise UserError(f"{verbose!r} does not name loggers", key="hydra.verbose", remedy=remedy)
    callbacks = hydra.get("callbacks")
    for name, node in callbacks.items() if isinstance(callbacks, dict) else ():
        if node is not None and not isinstance(node, dict):
            key = f"hydra.callbacks.{name}"
            raise UserError(f"{node!r} is not a callback", key=key, remedy=f"Name a class: +{key}._target_=…")


def _check_class(target: object, key: str) -> None:
    if not isinstance(target, str):
        raise UserError(f"{target!r} is not the path of a class", key=key, remedy="Write package.module.Class.")
    if target in hydra_versions.HARMLESS:
        return
    try:
        hydra_versions.allow(target, ALLOWLIST.locate(target, key))
    except UserError as error:
        raise UserError(error.problem, key=key, remedy=error.remedy) from error


def check_search_path(name: str, overrides: Sequence[str]) -> None:
    """Refuse packages that are not trusted, before Hydra composes with them. A composer has to be open.

    Args:
        name: of the primary config, the only one in which Hydra reads `hydra.searchpath`.
        overrides: of Hydra's own options.
    """
    found = [_in_primary(name)]
    found += [override.value() for override in parse(overrides) if override.key_or_group == _SEARCH_PATH]
    for entries in found:
        for entry in entries if isinstance(entries, list | ListConfig) else [entries]:
            if isinstance(entry, str):  # Hydra refuses anything else
                _check_entry(entry)


def _in_primary(name: str) -> object:
    """Return `hydra.searchpath` of the primary config."""
    sources = GlobalHydra.instance().config_loader().get_sources()
    config = next((source.load_config(name).config for source in sources if source.is_config(name)), None)
    if not isinstance(config, DictConfig):
        return None
    hydra = written(config, "hydra")
    text = str(hydra.get("searchpath") if isinstance(hydra, dict) else hydra)
    if "${" in _ENVIRONMENT.sub("", text):
        raise UserError(
            "an interpolation is refused here, because it can become a package that was not checked",
            key=_SEARCH_PATH,
            remedy="Write the folder itself, or use ${oc.env:NAME}.",
        )
    return OmegaConf.select(config, _SEARCH_PATH)


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
