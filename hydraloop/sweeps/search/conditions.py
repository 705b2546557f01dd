"""Which dimensions of a search depend on the option of a config group: a key exists only with some options.

`optimizer=sgd,adamw optimizer.momentum=interval(0.5,0.99)`: only SGD has a momentum. It is not sampled with AdamW.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hydraloop.config.messages import COMPOSING_ERRORS
from hydraloop.sweeps.axes import Lines
from hydraloop.sweeps.grid import GridComposer
from hydraloop.sweeps.search.space import Dimension, Space


def with_conditions(space: Space, grid: GridComposer) -> Space:
    """Return a space whose dimensions have their conditions.

    Args:
        grid: composes the jobs.
    """
    chosen = [one for one in space.dimensions if grid.choices([f"{one.element}={one.ends()[0]}"])]

    @cache
    def composed(lines: Lines) -> DictConfig | None:
        with suppress(*COMPOSING_ERRORS, ValueError):  # reported when the jobs are checked
            return grid.compose(lines)
        return None

    def has(lines: Lines, key: str) -> bool:
        cfg, (parent, _, name) = composed(lines), key.rpartition(".")
        node: Any = cfg if cfg is None or not parent else OmegaConf.select(cfg, parent)
        return OmegaConf.is_dict(node) and name in node

    def condition(one: Dimension) -> Dimension:
        if one.element.startswith("+") or one in chosen:
            return one
        only, needed = dict[str, tuple[str, ...]](), space.constants
        for group in chosen:
            lines = {choice: (*needed, f"{group.element}={choice}") for choice in group.choices}
            found = tuple(choice for choice, job in lines.items() if has(job, one.key))
            if found and len(found) < len(lines):
                only[group.key], needed = found, lines[found[0]]
        return replace(one, only=only)

    found = map(condition, space.dimensions)
    return replace(space, dimensions=tuple(sorted(found, key=lambda one: bool(one.only))))
