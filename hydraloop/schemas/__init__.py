"""Every option as a dataclass in Hydra's ConfigStore. Nothing here imports torch or another part of hydraloop.

A hook option is stored as `store(group="hooks", name="ema", package="hooks.ema", node=EMAHookConf)`. Your own options
work the same way, in any module that is imported before `hydraloop.main()`.
"""

from dataclasses import dataclass, field, is_dataclass
from importlib import import_module
from typing import Any, Dict, Iterator, Optional, Tuple

from hydra.core.config_store import ConfigNode, ConfigStore
from omegaconf import DictConfig, OmegaConf

MODULES = (
    "root",
    "precision",
    "task",
    "model",
    "data",
    "optimizer",
    "scheduler",
    "hooks_data",
    "hooks_device",
    "hooks_evaluation",
    "hooks_guards",
    "hooks_observing",
    "hooks_tracking",
    "hooks_training",
)


@dataclass
class _Option(ConfigNode):
    """A stored option. Its config is created when it is first read, because creating all of them takes 70 ms."""

    schema: Any
    """The dataclass, or a mapping."""
    node: DictConfig = field(init=False)

    def __getattr__(self, name: str) -> Any:
        if name != "node":
            raise AttributeError(name)
        self.node = OmegaConf.structured(self.schema)
        return self.node

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
        options[f"{name}.yaml"] = _Option(f"{name}.yaml", group, package, provider, node)


def register() -> None:
    """Put all options into the ConfigStore; called when hydraloop is imported. A second call changes nothing."""
    store = _Store()
    store.repo = ConfigStore.instance().repo
    for module in MODULES:
        import_module(f"{__name__}.{module}").register(store)


def stored(group: str) -> Iterator[Tuple[str, Any]]:
    """Yield the name and the dataclass of each stored option of a group, in the order of storing."""
    for file, entry in ConfigStore.instance().repo.get(group, {}).items():
        schema = entry.schema if isinstance(entry, _Option) else OmegaConf.get_type(entry.node)
        if is_dataclass(schema):
            yield file[: -len(".yaml")], schema
