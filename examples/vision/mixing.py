"""Mixup and CutMix of timm: batches of mixed images, with a share of each class as the target."""

from collections.abc import Callable
from typing import Any

from hydraloop.tasks import Classification


class MixupClassification(Classification):
    """Classification that mixes the images of a batch in training, on the device of the batch.

    Args:
        mixup: called with (images, classes), such as `timm.data.Mixup`.
        options: of `Classification`.
    """

    def __init__(self, mixup: Callable[..., Any], **options: Any) -> None:
        super().__init__(**options)
        self.mixup = mixup

    def forward(self, batch: Any) -> dict[str, Any]:
        return super().forward(self.mixup(*batch) if self.training else batch)
