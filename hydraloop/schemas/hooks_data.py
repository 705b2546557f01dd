"""Options of the hooks about data and inputs: mode_switch, sync_random_size, set_epoch_info, num_class_check."""

from dataclasses import dataclass
from typing import List, Optional

from hydra.core.config_store import ConfigStore

from hydraloop.schemas.hook import HookConf, store_hooks


@dataclass
class ModeSwitchHookConf(HookConf):
    """Switches off strong augmentations and switches on an extra loss for the last epochs."""

    _target_: str = "hydraloop.hooks.ModeSwitchHook"
    num_last_epochs: int = 15
    """Number of last epochs, at least 1. 15 of 300, as in YOLOX and MMDetection. A run with fewer epochs is in this
    mode from its start; with `engine.max_iters`, a partial last epoch counts as one."""


@dataclass
class SyncRandomSizeHookConf(HookConf):
    """Multi-scale training: a new input size every few iterations, the same on every rank."""

    _target_: str = "hydraloop.hooks.SyncRandomSizeHook"
    interval: int = 10
    """Iterations at one size, at least 1. 10, as in YOLOX and MMDetection's BatchSyncRandomResize."""
    min_ratio: float = 0.7
    """Smallest height as a share of the data's height, above 0. MMDetection: 14 * 32 of 640 pixels."""
    max_ratio: float = 1.3
    """Largest height as a share of the data's height, at least `min_ratio`. MMDetection: 26 * 32 of 640 pixels."""
    divisor: int = 1
    """Heights and widths are multiples of this number. 1 allows any size, which images of 8 pixels need; detectors
    usually need 32, MMDetection's value."""


@dataclass
class SetEpochInfoHookConf(HookConf):
    """Calls `set_epoch(epoch)` of the task, the model and the train data set, if they have it."""

    _target_: str = "hydraloop.hooks.SetEpochInfoHook"


@dataclass
class NumClassCheckHookConf(HookConf):
    """Rejects, before the first iteration, a model whose number of classes differs from that of the data sets."""

    _target_: str = "hydraloop.hooks.NumClassCheckHook"
    ignore: Optional[List[str]] = None
    """Modules, given by the end of their name in the task (`roi_head.mask_head`), whose `num_classes` has another
    meaning. Null: `rpn_head`, as in MMDetection: it separates objects from background. A name that matches no module
    with a number of classes is a warning."""


def register(store: ConfigStore) -> None:
    """Store them in the group `hooks`."""
    store_hooks(
        store,
        mode_switch=ModeSwitchHookConf,
        sync_random_size=SyncRandomSizeHookConf,
        set_epoch_info=SetEpochInfoHookConf,
        num_class_check=NumClassCheckHookConf,
    )
