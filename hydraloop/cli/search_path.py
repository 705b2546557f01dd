"""Check `hydra.searchpath`. Hydra imports the packages in it, so they must be on the allowlist."""

from __future__ import annotations

import re
from collections.abc import Sequence

from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, ListConfig, OmegaConf

from hydraloop.cli.arguments import parse
from hydraloop.errors import UserError
from hydraloop.safety.allowlist import ALLOWLIST

_KEY = "hydra.searchpath"
_OF_HYDRA = "hydra.conf"
_ENVIRONMENT = re.compile(r"\$\{oc\.env:\w+\}")
_SCHEMES = ("pkg", "structured")
"""These are followed by the name of a module, which Hydra imports."""


def check_search_path(name: str, overrides: Sequence[str]) -> None:
    """Refuse packages that are not trusted, before Hydra composes with them. A composer has to be open.

    Args:
        name: of the primary config, the only one in which Hydra reads `hydra.searchpath`.
    """
    found = [_in_primary(name)]
    found += [override.value() for override in parse(overrides) if override.key_or_group == _KEY]
    for entries in found:
        for entry in entries if isinstance(entries, list | ListConfig) else [entries]:
            if isinstance(entry, str):  # Hydra refuses anything else
                _check(entry)


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
                    key=_KEY,
                    remedy="Write the folder itself, or use ${oc.env:NAME}.",
                )
            return OmegaConf.select(config, _KEY)
    return None


def _written(config: DictConfig) -> str:
    """Return `hydra.searchpath` as written; all of `hydra` if that is an interpolation."""
    hydra = OmegaConf.to_container(config, resolve=False)
    hydra = hydra.get("hydra") if isinstance(hydra, dict) else None
    return str(hydra.get("searchpath") if isinstance(hydra, dict) else hydra)


def _check(entry: str) -> None:
    scheme, separator, rest = entry.partition("://")
    if not separator or scheme == "file":
        return
    module = rest.replace("/", ".").rstrip(".")
    if scheme not in _SCHEMES:
        raise UserError(f"{entry} is not a folder", key=_KEY, remedy="Name a folder, or a package: pkg://package.conf")
    if module != _OF_HYDRA and not ALLOWLIST.may_import(module):
        raise UserError(
            f"Hydra would import {module} to look for config files in it",
            key=_KEY,
            remedy=f"Name its folder instead, or, if you trust it, {ALLOWLIST.remedy(module.split('.')[0])}",
        )
