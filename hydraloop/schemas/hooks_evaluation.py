"""Options of the hooks that are about validation and test: tta, visualization."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, List, Optional, Tuple, Union

from hydra.core.config_store import ConfigStore


@dataclass
class TestTimeAugmentationHookConf:
    """Tests on the mean over several views of each image; training and validation do not notice."""

    __test__: ClassVar[bool] = False  # for pytest, which looks for classes called Test…
    default_priority: ClassVar[int] = 0
    mount_points: ClassVar[Tuple[str, ...]] = ("before_train", "before_test_epoch")
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.TestTimeAugmentationHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: HIGHEST: every other hook finds the model that will be tested."""
    on_error: Optional[str] = "raise"
    """`raise`, `warn` or `disable`; a test without the views would be another test."""
    transforms: List[Any] = field(default_factory=lambda: ["identity", "hflip"])
    """Views of each image: `identity`, `hflip`, `vflip`, `rot90`, `rot180`, `rot270`, `shift` (four of them), and
    mappings with `_target_`. The mirror image, the usual one (MMPretrain's, too), since most photographs mean the same
    in it. Digits, letters and signs do not, and the test becomes worse: for these, [identity,shift]."""
    merge: str = "auto"
    """`probabilities`: their mean, MMPretrain's; `outputs`: the mean of the outputs, which a regression needs; `auto`,
    since the loss tells which: probabilities with torch's cross-entropy or NLL."""
    shift: int = 1
    """Pixels by which the views of `shift` are moved, less than an image's height and width; 1, which does not move
    small images out of sight."""


@dataclass
class VisualizationHookConf:
    """A picture of the first images of each validation and test, with label and prediction on each."""

    default_priority: ClassVar[int] = 100
    mount_points: ClassVar[Tuple[str, ...]] = (
        "before_train",
        "after_val_iter",
        "after_val_epoch",
        "after_test_iter",
        "after_test_epoch",
    )
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.VisualizationHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: LOWEST: its record comes behind that of the metrics."""
    on_error: Optional[str] = "warn"
    """`raise`, `warn` or `disable`; no training should end for its picture."""
    interval: int = 1
    """Batches of an evaluation between two whose images are drawn; 1 is MMEngine's: the first ones."""
    num_images: int = 32
    """Most images in a picture; 32 are a screen of digits, and a file of some 50 kB."""
    per_batch: Optional[int] = None
    """Most images of one batch. Null: all; a small number, with an `interval`, goes through sorted data."""
    size: int = 128
    """Pixels of an image's longer side in the picture: smaller ones are enlarged by whole numbers, not smoothed, up to
    it, larger ones reduced to it. 128: pixels of a digit can be told apart, and a photograph can be recognised."""


def register(store: ConfigStore) -> None:
    """Store both in the group `hooks`."""
    store.store(group="hooks", name="tta", package="hooks.tta", node=TestTimeAugmentationHookConf)
    store.store(group="hooks", name="visualization", package="hooks.visualization", node=VisualizationHookConf)
