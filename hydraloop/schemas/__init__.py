"""Every option as a dataclass in Hydra's ConfigStore. Nothing here imports torch or another part of hydraloop.

A hook option is stored as `store(group="hooks", name="ema", package="hooks.ema", node=EMAHookConf)`. Your own options
work the same way, in any module that is imported before `hydraloop.main()`.
"""

from importlib import import_module

from hydra.core.config_store import ConfigStore

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


def register() -> None:
    """Put all options into the ConfigStore; called when hydraloop is imported. A second call changes nothing."""
    for module in MODULES:
        import_module(f"{__name__}.{module}").register(ConfigStore.instance())
