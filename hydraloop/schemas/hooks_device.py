"""Options of the hooks about devices and ranks: empty_cache, sync_buffers, sync_norm."""

from dataclasses import dataclass

from hydra.core.config_store import ConfigStore

from hydraloop.schemas.hook import HookConf, store_hooks


@dataclass
class EmptyCacheHookConf(HookConf):
    """Returns unused cached memory to the device."""

    _target_: str = "hydraloop.hooks.EmptyCacheHook"
    before_epoch: bool = False
    """Whether to empty the cache before each train, val and test epoch. False, as in MMEngine: the end of the previous
    epoch is nearly the same moment."""
    after_epoch: bool = True
    """Whether to empty it after each train, val and test epoch. True, as in MMEngine: what follows needs other
    sizes."""
    after_iter: bool = False
    """Whether to empty it after each iteration. False, as in MMEngine: every iteration would wait for the device and
    allocate its memory again."""


@dataclass
class SyncBuffersHookConf(HookConf):
    """Averages all buffers of the model over the ranks at the end of each epoch."""

    _target_: str = "hydraloop.hooks.SyncBuffersHook"
    norm_only: bool = False
    """Whether to average only the running statistics of normalisation layers, and only before an evaluation. False, as
    in MMEngine: checkpoints have the averages too."""


@dataclass
class SyncNormHookConf(SyncBuffersHookConf):
    """Averages the running statistics of normalisation layers over the ranks before each evaluation."""

    norm_only: bool = True
    """Whether to average only the running statistics of normalisation layers, and only before an evaluation. True, as
    in MMDetection's SyncNormHook."""


def register(store: ConfigStore) -> None:
    """Store them in the group `hooks`."""
    store_hooks(store, empty_cache=EmptyCacheHookConf, sync_buffers=SyncBuffersHookConf, sync_norm=SyncNormHookConf)
