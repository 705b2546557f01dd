"""An error of Hydra or OmegaConf, and the override that it names."""

from __future__ import annotations

from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hydraloop.cli.compose import Composer
from hydraloop.cli.config_file_limits import leaves


class Case(NamedTuple):
    """An error of Hydra or OmegaConf, and the override that it names; without one, `key` and `line` are empty."""

    text: str
    cause: str
    key: str
    line: str
    value: Any
    cfg: DictConfig
    """The config without the override, for suggestions; empty if it cannot be composed either."""
    composer: Composer

    @property
    def parent(self) -> str:
        return self.key.rpartition(".")[0]


def select(cfg: DictConfig, key: str) -> Any:
    """Return the value at a key; None if the key does not exist, also if the path leads through a list."""
    try:
        return OmegaConf.select(cfg, key)
    except OmegaConfBaseException:
        return None


def keys_of(cfg: DictConfig) -> list[str]:
    """Return the full keys of all values, except Hydra's."""
    raw: Any = OmegaConf.to_container(cfg, resolve=False)
    return [key for name, node in raw.items() if name != "hydra" for key, _ in leaves(node, str(name))]
