"""Segmentation: one class for each pixel."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hydraloop.tasks.metrics import Accuracy, Metric
from hydraloop.tasks.task import LOSS, OUTPUTS, TARGETS, Task
from hydraloop.tasks.values import output_error


class Segmentation(Task):
    """Batches `(images [N, ...], classes [N, H, W])`, classes of any integer type; the model returns `[N, C, H, W]`.

    Every pixel has the same weight in the loss and in the metrics, no matter how many pixels of a batch, of a rank or
    of an accumulation window are ignored.

    Args:
        model: returns logits in the size of the classes. A model that returns another type of output, such as a dict,
            needs a module around it.
        num_classes: C.
        loss: function of (logits `[N, C, H, W]` in float32, classes int64 `[N, H, W]`) that returns the mean over the
            pixels that are not ignored. None: the cross entropy.
        metrics: as in `Task`. They are updated with the logits and the classes. `Accuracy` gets the `ignore_index`
            of the task; other metrics have one of their own.
        ignore_index: the class of pixels that do not count.
    """

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        metrics: Mapping[str, Metric | None] | None = None,
        ignore_index: int = 255,
    ) -> None:
        super().__init__(model, nn.CrossEntropyLoss(ignore_index=ignore_index) if loss is None else loss, metrics)
        self.num_classes, self.ignore_index = num_classes, ignore_index
        for metric in self.metrics.values():
            if isinstance(metric, Accuracy):
                metric.ignore_index = ignore_index

    def forward(self, batch: Any) -> dict[str, Any]:
        """Return `{"loss": (sum of the losses, number of pixels)}`, both scalar tensors. No host sync.

        In eval mode also `outputs`, the logits `[N, C, H, W]`, and `targets`, the classes int64 `[N, H, W]`.
        """
        images, classes = batch
        logits, classes = self.call_model(images, classes), classes.long()
        count = (classes != self.ignore_index).sum()
        # The mean over no pixels is NaN.
        loss = (torch.where(count > 0, self.compute_loss(logits.float(), classes) * count, 0.0), count)
        return {LOSS: loss} if self.training else {LOSS: loss, OUTPUTS: logits, TARGETS: classes}

    def call_model(self, inputs: Any, targets: Tensor) -> Tensor:
        """Return the logits `[N, C, H, W]`.

        Raises:
            UserError: the model's output does not have this shape.
        """
        logits = self.model(inputs)
        expected = (len(targets), self.num_classes, *targets.shape[1:])
        if isinstance(logits, Tensor) and logits.shape == expected:
            return logits
        raise output_error(
            self.model,
            logits,
            f"for classes {list(targets.shape)}, but a segmentation with task.num_classes={self.num_classes} needs "
            f"logits {list(expected)}",
            "Let the model's forward return num_classes logits for each pixel, in the size of the classes.",
        )

    def predictions_of(self, outputs: Tensor) -> Tensor:
        """Return the classes `[N, H, W]`."""
        return outputs.argmax(1)
