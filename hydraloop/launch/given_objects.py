"""Finished objects that Python code gives to `hydraloop.build` and `hydraloop.load`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hydraloop.engine.hook import Hook, check_hook
from hydraloop.engine.loaders import Loaders
from hydraloop.errors import UserError
from hydraloop.schemas.data import SPLITS


@dataclass(frozen=True)
class Parts:
    """Finished objects, used instead of those that the config describes."""

    task: nn.Module | None = None
    """A task, or a model, which the task of the config gets."""
    loaders: Loaders | Mapping[str, Any] = field(default_factory=dict)
    """By split (None: no loader)."""
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
        for name, hook in self.hooks.items():
            check_hook(hook, f"hooks.{name}")

    @property
    def all_loaders(self) -> Loaders | Mapping[str, Any]:
        """The loaders of a run that trains: if any is given, splits that are not given are empty.

        The config's other data may have nothing to do with those that are given.
        """
        given = self.loaders
        return given if isinstance(given, Loaders) or not given else {**dict.fromkeys(SPLITS), **given}

    @property
    def names(self) -> list[str]:
        """The keys in the config, which does not describe them."""
        splits = SPLITS if isinstance(self.loaders, Loaders) else self.loaders
        whole = [name for name in ("task", "optimizer") if getattr(self, name) is not None]
        return [*whole, *(f"data.{split}" for split in splits), *(f"hooks.{name}" for name in self.hooks)]

    @property
    def meta(self) -> dict[str, list[str]]:
        """The entries of a checkpoint's `meta` (see `format.py`)."""
        changing = [f"hooks.{name}" for name, hook in self.hooks.items() if hook.changes_evaluation]
        return {"given": self.names, "changes_evaluation": changing} if self.names else {}

    def check(self, wanted: Iterable[str], call: str) -> None:
        """Refuse to build from the config what a run got as finished objects.

        Args:
            wanted: the keys of these objects.
            call: the beginning of the call that takes them.
        """
        missing = [key for key in wanted if key not in self.names]
        if missing:
            groups = dict.fromkeys(key.partition(".")[0] for key in missing)
            arguments = [f"{'loaders' if group == 'data' else group}=…" for group in groups]
            raise UserError(
                "the run got an object from Python, which its config does not describe",
                key=", ".join(missing),
                remedy=f"Give it again: {call}, {', '.join(arguments)}).",
            )


NONE = Parts()
"""Everything is built from the config."""
