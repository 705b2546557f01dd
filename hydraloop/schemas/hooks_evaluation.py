"""Options of the hooks about validation and test: tta, visualization."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, List, Optional

from hydra.core.config_store import ConfigStore

from hydraloop.schemas.hook import HookConf, store_hooks


@dataclass
class TestTimeAugmentationHookConf(HookConf):
    """Tests on the mean over several views of each image; training and validation are unchanged."""

    __test__: ClassVar[bool] = False  # pytest would collect a class whose name begins with Test

    _target_: str = "hydraloop.hooks.TestTimeAugmentationHook"
    transforms: List[Any] = field(default_factory=lambda: ["identity", "hflip"])
    """Views of each image, at least one: `identity`, `hflip`, `vflip`, `rot90`, `rot180`, `rot270`, `shift` (four
    views), and mappings with `_target_`. Each view has the same weight. The default adds the mirror image, as in
    MMPretrain, which means the same for most photographs. It does not for digits, letters and signs, where it makes
    the test worse; use [identity,shift] for these."""
    merge: str = "auto"
    """`probabilities`: the mean of the class probabilities, as in MMPretrain; it is passed on as its logarithm.
    `outputs`: the mean of the outputs, for regression. `auto`: probabilities if the task's loss is torch's
    cross-entropy or NLL, else outputs."""
    shift: int = 1
    """Pixels by which the views of `shift` are moved, at least 1 and less than an image's height and width. 1, so that
    small images stay visible."""


@dataclass
class VisualizationHookConf(HookConf):
    """Draws the first images of each validation and test with their labels and predictions."""

    _target_: str = "hydraloop.hooks.VisualizationHook"
    on_error: Optional[str] = "warn"
    interval: int = 1
    """Draws images from every `interval`-th batch of an evaluation, at least 1, until the picture is full. 1, as in
    MMEngine: the first batches."""
    num_images: int = 32
    """Maximum number of images in a picture, at least 1. 32 digits fill a screen, in a file of about 50 kB."""
    per_batch: Optional[int] = None
    """Maximum number of images from one batch, at least 1. Null: no limit. A small number with a larger `interval`
    samples from data that are sorted."""
    size: int = 128
    """Pixels of an image's longer side in the picture, at least 1. Smaller images are enlarged by a whole factor
    without smoothing, larger ones are reduced. At 128, single pixels of a digit are visible and photographs are
    recognisable."""


def register(store: ConfigStore) -> None:
    """Store them in the group `hooks`."""
    store_hooks(store, tta=TestTimeAugmentationHookConf, visualization=VisualizationHookConf)
