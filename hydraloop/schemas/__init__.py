"""Every option as a dataclass in Hydra's ConfigStore. Nothing here imports torch or another part of hydraloop.

A hook option is stored as `store(group="hooks", name="ema", package="hooks.ema", node=EMAHookConf)`. Your own options
work the same way, in any module that is imported before `hydraloop.main()`.
"""

from copy import deepcopy
from dataclasses import is_dataclass
from functools import cached_property
from importlib import import_module
from inspect import isfunction
from typing import Any, Dict, Iterator, Optional, Tuple

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf

MODULES = ("root", "engine", "task", "data", "optimizer", "scheduler", "hooks", "hooks_observing")


class _Schema:
    """Becomes a config when Hydra copies it to read it, because creating the configs of all options takes 70 ms.

    Args:
        schema: the dataclass, a mapping, or a function that returns the config.
    """

    def __init__(self, schema: Any) -> None:
        self.schema = schema

    @cached_property
    def config(self) -> DictConfig:
        """The config, created once: a copy takes a third of the time."""
        schema = self.schema() if isfunction(self.schema) else self.schema
        created: DictConfig = OmegaConf.structured(schema)
        return created

    def __deepcopy__(self, memo: Dict[int, Any]) -> DictConfig:
        return deepcopy(self.config, memo)


class _Option(ConfigNode):
    """A stored option, whose `node` is a `_Schema`."""

    def __deepcopy__(self, memo: Dict[int, Any]) -> "_Option":
        return self  # Hydra copies the whole store each time it composes, and only reads it


class _Store(ConfigStore):
    """Hydra's ConfigStore, with options that create their configs when they are first read."""

    def store(
        self,
        name: str,
        node: Any,
        group: Optional[str] = None,
        package: Optional[str] = None,
        provider: Optional[str] = None,
    ) -> None:
        options = self.repo
        for part in group.split("/") if group else ():
            options = options.setdefault(part, {})
        unread: Any = _Schema(node)
        options[f"{name}.yaml"] = _Option(f"{name}.yaml", unread, group, package, provider)


def register() -> None:
    """Put all options into the ConfigStore; called when hydraloop is imported. A second call changes nothing."""
    store = _Store()
    store.repo = ConfigStore.instance().repo
    for module in MODULES:
        import_module(f"{__name__}.{module}").register(store)


def stored(group: str) -> Iterator[Tuple[str, Any]]:
    """Yield the name and the dataclass of each stored option of a group, in the order of storing."""
    for file, entry in ConfigStore.instance().repo.get(group, {}).items():
        schema = entry.node.schema if isinstance(entry, _Option) else OmegaConf.get_type(entry.node)
        if is_dataclass(schema):
            yield file[: -len(".yaml")], schema
