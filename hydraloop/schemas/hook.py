"""The options that all hooks have, and how hooks are stored in Hydra's ConfigStore."""

from dataclasses import dataclass
from typing import ClassVar, Optional, Tuple, Union

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class HookConf:
    """Base of the options of a hook. A subclass sets `_target_`."""

    functions: ClassVar[Tuple[str, ...]] = ()
    """Options that are functions: one that `_target_` names is given to the hook, not called."""

    _target_: str = MISSING
    priority: Optional[Union[int, str]] = None
    """When the hook is called at each mount point: from 0 (first) to 100 (last), or a name such as HIGH. Null: the
    default of its class."""
    on_error: Optional[str] = "raise"
    """What happens when the hook fails: `raise` ends the run, `warn` logs the error and continues, `disable` also
    switches the hook off. Hooks that only observe default to `warn`: a failed chart should not end a training. The
    others default to `raise`: without them it would be a different training. Hooks that communicate with other ranks
    can only raise, because the other ranks would wait for them."""


def store_hooks(store: ConfigStore, group: str = "hooks", **options: type) -> None:
    """Store dataclasses under their names as options of `group`, which is `hooks` or `default_hooks`."""
    for name, option in options.items():
        store.store(group=group, name=name, package=f"{group}.{name}", node=option)
