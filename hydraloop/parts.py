"""Finished objects that Python code gives to `hydraloop.build` and `hydraloop.load`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.errors import UserError
from hydraloop.schemas.data import SPLITS
from hydraloop.tasks.task import Task


@dataclass(frozen=True)
class Parts:
    """Finished objects, used instead of those that the config describes."""

    task: Task | None = None
    loaders: Loaders | Mapping[str, Any] = field(default_factory=dict)
    """All loaders, or those of some splits (None: no loader)."""
    optimizer: Any = None
    """An optimizer, a mapping of them by name, or a function of the list of trained parameters that returns one."""
    hooks: Mapping[str, Hook] = field(default_factory=dict)
    """In addition to those of the config."""

    def __post_init__(self) -> None:
        objects: dict[str, object] = {"loaders": self.loaders, "hooks": self.hooks}
        for name, given in objects.items():
            if not isinstance(given, Mapping | Loaders):
                key = "train" if name == "loaders" else "mine"
                remedy = f'Give them by name: {name}={{"{key}": …}}'
                raise UserError(f"{type(given).__name__} is not a mapping", key=name, remedy=remedy)

    @property
    def names(self) -> list[str]:
        """The keys of the config that are not used."""
        splits = SPLITS if isinstance(self.loaders, Loaders) else self.loaders
        return [*(["task"] if self.task is not None else []), *(f"data.{split}" for split in splits)]


NONE = Parts()
"""Everything is built from the config."""
