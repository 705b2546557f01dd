"""Options of the hooks about data and inputs: mode_switch, sync_random_size, set_epoch_info, num_class_check."""

from dataclasses import dataclass
from typing import ClassVar, List, Optional, Tuple, Union

from hydra.core.config_store import ConfigStore


@dataclass
class ModeSwitchHookConf:
    """The last epochs without strong augmentations and with an extra loss, in loader workers too."""

    default_priority: ClassVar[int] = 50
    mount_points: ClassVar[Tuple[str, ...]] = ("before_train", "before_train_epoch")
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.ModeSwitchHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: NORMAL, MMDetection's: no other hook reads what it changes."""
    on_error: Optional[str] = "raise"
    """`raise`, `warn` or `disable`; the last epochs in the wrong mode would be another training."""
    num_last_epochs: int = 15
    """Epochs, at least 1; 15 is YOLOX's and MMDetection's, of 300. A shorter run has that mode from its start."""


@dataclass
class SyncRandomSizeHookConf:
    """Multi-scale training: a new input size every few iterations, the same on every rank."""

    default_priority: ClassVar[int] = 50
    mount_points: ClassVar[Tuple[str, ...]] = ("before_train", "before_train_iter", "on_exception", "after_train")
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.SyncRandomSizeHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: NORMAL, MMDetection's: batches stay as they are for other hooks."""
    on_error: Optional[str] = "raise"
    """`raise`, `warn` or `disable`; at the data's own size it would be another training."""
    interval: int = 10
    """Iterations at one size, at least 1; 10 is YOLOX's, and that of MMDetection's BatchSyncRandomResize."""
    min_ratio: float = 0.7
    """The smallest height, as a share of the data's own, above 0; MMDetection's 14 * 32 of 640 pixels."""
    max_ratio: float = 1.3
    """The largest height, as a share of the data's own, at least `min_ratio`; MMDetection's 26 * 32 of 640 pixels."""
    divisor: int = 1
    """Heights and widths are multiples of it. 1: any, as images of 8 pixels need; 32, MMDetection's, for detectors."""


@dataclass
class SetEpochInfoHookConf:
    """Calls `set_epoch(epoch)` on the task, the model and the train data set, where they have it."""

    default_priority: ClassVar[int] = 50
    mount_points: ClassVar[Tuple[str, ...]] = ("before_train", "before_train_epoch")
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.SetEpochInfoHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: NORMAL, MMDetection's."""
    on_error: Optional[str] = "raise"
    """`raise`, `warn` or `disable`; what depends on the epoch would go on with an old one."""


@dataclass
class NumClassCheckHookConf:
    """Refuses, before the first iteration, a model with another number of classes than the data sets have."""

    default_priority: ClassVar[int] = 50
    mount_points: ClassVar[Tuple[str, ...]] = ("before_run",)
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.NumClassCheckHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: NORMAL, MMDetection's: it only looks."""
    on_error: Optional[str] = "raise"
    """`raise`, `warn` or `disable`; a check that is asked for is to be heeded."""
    ignore: Optional[List[str]] = None
    """Modules, by the end of their name, whose `num_classes` means something else. Null: MMDetection's `rpn_head`."""


def register(store: ConfigStore) -> None:
    """Store them in the group `hooks`."""
    for name, node in (
        ("mode_switch", ModeSwitchHookConf),
        ("sync_random_size", SyncRandomSizeHookConf),
        ("set_epoch_info", SetEpochInfoHookConf),
        ("num_class_check", NumClassCheckHookConf),
    ):
        store.store(group="hooks", name=name, package=f"hooks.{name}", node=node)
