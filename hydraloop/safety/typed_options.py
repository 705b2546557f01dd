"""Which options were typed on the command line or given to `hydraloop.compose`. Imports no torch.

A resumed run keeps the values of its checkpoint, except for options that were typed when it was resumed. Some options
may name a file or set an environment variable only if they were typed (`cli/config_file_limits.py`).
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable, Iterator

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

_remembered: dict[int, list[str]] = {}
"""By the `id` of a config, while it exists."""


def keys_of(overrides: Iterable[str]) -> list[str]:
    """Return the keys of the options that overrides set: `a.b` and `a.c` for `++a={b: 1, c: 2}`, none for `~a`.

    Args:
        overrides: as typed, and valid.
    """
    return list(_keys_of(tuple(overrides)))


@functools.lru_cache(maxsize=1)  # each value of a sweep is checked with the same overrides, whose axes may be long
def _keys_of(overrides: tuple[str, ...]) -> tuple[str, ...]:
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    keys = (
        _leaves(one.key_or_group, None if one.is_sweep_override() else one.value())
        for one in parsed
        if not one.is_delete()
    )
    return tuple(dict.fromkeys(key for found in keys for key in found))


def _leaves(key: str, value: object) -> Iterator[str]:
    if not isinstance(value, dict):
        yield key
        return
    for name, inner in value.items():
        yield from _leaves(f"{key}.{name!s}", inner)


def remember(cfg: DictConfig, keys: Iterable[str]) -> None:
    """Note which keys were typed, for a config that this process did not compose from its command line."""
    _remembered[id(cfg)] = list(keys)
    weakref.finalize(cfg, _remembered.pop, id(cfg), None)


def keys(cfg: DictConfig) -> list[str]:
    """Return the keys that were typed for a config: those remembered, otherwise those of Hydra's running job."""
    if id(cfg) in _remembered:
        return _remembered[id(cfg)]
    return keys_of(HydraConfig.get().overrides.task) if HydraConfig.initialized() else []
