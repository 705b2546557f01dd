"""Multi-label classification: any number of classes for each sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hydraloop.errors import UserError
from hydraloop.tasks.metrics import Metric
from hydraloop.tasks.task import LOSS, OUTPUTS, TARGETS, Task
from hydraloop.tasks.values import shown


class MultiLabel(Task):
    """Batches `(inputs [N, ...], labels [N, C])`, a label for each class, 1 or 0; the model returns logits `[N, C]`.

    Args:
        model: from inputs to logits.
        num_classes: C.
        loss: function of (logits, labels), both float `[N, C]`, that returns the scalar mean over the batch. None: the
            binary cross entropy of all labels.
        metrics: as in `Task`. They are updated with probabilities `[N, C]`, the sigmoid of the logits, and with labels
            int64 `[N, C]`. (torchmetrics would take logits between 0 and 1 for probabilities.)
    """

    def __init__(
        self,
        model: nn.Module,
        num_classes: int,
        loss: Callable[[Tensor, Tensor], Tensor] | None = None,
        metrics: Mapping[str, Metric | None] | None = None,
    ) -> None:
        super().__init__(model, nn.BCEWithLogitsLoss() if loss is None else loss, metrics)
        self.num_classes = num_classes

    def forward(self, batch: Any) -> dict[str, Any]:
        """Return `{"loss": scalar}`, in eval mode also `outputs`, the probabilities, and `targets`. No host sync."""
        inputs, labels = batch
        logits = self.call_model(inputs, labels)
        loss = self.loss(logits, labels.to(logits.dtype))
        return {LOSS: loss} if self.training else {LOSS: loss, OUTPUTS: logits.sigmoid(), TARGETS: labels.long()}

    def call_model(self, inputs: Any, targets: Tensor) -> Tensor:
        """Return the logits `[N, C]`.

        Raises:
            UserError: the model's output does not have this shape, or the labels do not.
        """
        logits = self.model(inputs)
        expected = (len(targets), self.num_classes)
        if isinstance(logits, Tensor) and logits.shape == expected == targets.shape:
            return logits
        remedy = "Let the data set return a label for each class, 1 or 0."
        if targets.ndim == 2:
            remedy = (
                f"Let the model return {targets.size(1)} logits, and set its num_classes, or task.num_classes, to it."
            )
        raise UserError(
            f"{type(self.model).__name__} returned {shown(logits)} for labels {list(targets.shape)}, but with "
            f"{self.num_classes} classes both are {list(expected)}",
            key="task.model" if targets.ndim == 2 else "data",
            remedy=remedy,
        )

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """Add a batch to the metrics. Return what `forward` returns, and `predictions`: labels `[N, C]`. No host sync,
        except in metrics of torchmetrics."""
        result = super().evaluate(batch)
        return {**result, "predictions": (result[OUTPUTS] > 0.5).long()}
