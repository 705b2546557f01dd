"""Every option as a dataclass, put into Hydra's ConfigStore. Nothing here imports torch or another part of hydraloop.

A hook option is stored as `store(group="hooks", name="ema", package="hooks.ema", node=EMAHookConf)`; a user's own works
the same way, from any module that is imported before `hydraloop.main()`.
"""

from hydra.core.config_store import ConfigStore


def register() -> None:
    """Put all options into the ConfigStore; importing hydraloop does it. Doing it again changes nothing."""
    from hydraloop.schemas import (
        data,
        hooks_data,
        hooks_device,
        hooks_evaluation,
        hooks_guards,
        hooks_observing,
        hooks_tracking,
        hooks_training,
        model,
        optimizer,
        precision,
        root,
        scheduler,
        task,
    )

    store = ConfigStore.instance()
    for module in (
        root,
        precision,
        task,
        model,
        data,
        optimizer,
        scheduler,
        hooks_data,
        hooks_evaluation,
        hooks_observing,
        hooks_training,
        hooks_guards,
        hooks_device,
        hooks_tracking,
    ):
        module.register(store)
