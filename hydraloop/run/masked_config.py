"""Configs in files, with their secrets masked; Hydra itself writes them as they are. Without torch."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydraloop.run import atomic
from hydraloop.run.config_yaml import dumped, resolved
from hydraloop.safety.secrets import looks_secret, mask_text, masked, remember

_NAME = re.compile(r"[\w.-]+(?=[\"']?[:=])")


def masked_yaml(cfg: DictConfig, *, resolve: bool) -> str:
    """The config as YAML.

    Args:
        resolve: whether to write values instead of interpolations.

    Raises:
        UserError: an interpolation does not resolve; names its key.
    """
    plain = resolved(cfg) if resolve else OmegaConf.to_container(cfg, resolve=False, enum_to_str=True)
    return dumped(masked(plain))


def remember_config(cfg: DictConfig) -> None:
    """Know the config's secrets from now on, wherever they stand; also of one that does not wholly resolve."""
    try:
        remember(OmegaConf.to_container(cfg, resolve=True))
    except OmegaConfBaseException:  # reported by whoever needs the value
        remember(OmegaConf.to_container(cfg, resolve=False))


def mask_records(folder: Path) -> None:
    """Mask the YAML files that Hydra has written into a folder; files without secrets are not touched."""
    mask_files(sorted(folder.glob("*.yaml")))


def mask_files(paths: Iterable[Path]) -> None:
    """Mask YAML files in place, each all at once; those that do not exist, or have no secrets, are left alone."""
    for path in paths:
        if not path.is_file():
            continue
        text = path.read_text(encoding="utf-8")
        if mask_text(text) == text and not any(map(looks_secret, _NAME.findall(text))):
            continue  # which is so nearly always, and takes a thirtieth of the time
        found = OmegaConf.to_container(OmegaConf.load(path), resolve=False)
        hidden = masked(found)
        if hidden != found:
            atomic.write_text(path, dumped(hidden))
