"""Which options were typed, on the command line or as an argument of `hydraloop.compose`. Without torch.

A resumed run keeps the values of its checkpoint, except for options that were typed when it was resumed.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

_remembered: dict[int, list[str]] = {}
"""By the `id` of a config, as long as it exists."""


def keys_of(overrides: Iterable[str]) -> list[str]:
    """The keys of overrides that set a value: `optimizer.lr` of `++optimizer.lr=1e-2`."""
    return [line.lstrip("+").partition("=")[0] for line in overrides if not line.startswith("~")]


def remember(cfg: DictConfig, keys: Iterable[str]) -> None:
    """Note which keys were typed for a config that was not composed by the command line of this process."""
    _remembered[id(cfg)] = list(keys)
    weakref.finalize(cfg, _remembered.pop, id(cfg), None)


def keys(cfg: DictConfig) -> list[str]:
    """The keys that were typed for a config: as remembered, or as Hydra has them for the job that is running."""
    if id(cfg) in _remembered:
        return _remembered[id(cfg)]
    return keys_of(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
