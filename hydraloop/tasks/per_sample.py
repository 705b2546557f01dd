"""Tasks with one target for each sample: classification, multi-label classification and regression."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hydraloop.errors import UserError
from hydraloop.tasks.metrics import Metric
from hydraloop.tasks.task import LOSS, OUTPUTS, TARGETS, Task
from hydraloop.tasks.values import shown


class Classification(Task):
    """Batches `(inputs [N, ...], classes int64 [N])`; the model returns logits `[N, C]`, the loss takes both.

    Args: as in `Task`.
    """

    @property
    def num_classes(self) -> int | None:
        """The number of classes, from the model's `num_classes`; None if it has none."""
        number = getattr(self.model, "num_classes", None)
        return number if isinstance(number, int) else None

    def call_model(self, inputs: Any, targets: Tensor) -> Tensor:
        """Return the logits `[N, C]`.

        Raises:
            UserError: the model's output is not a floating-point tensor `[N, C]`, or has one class, whose cross-entropy
                is always 0.
        """
        logits: Tensor = self.model(inputs)
        is_matrix = isinstance(logits, Tensor) and logits.ndim == 2 and logits.is_floating_point()
        classes = logits.size(1) if is_matrix and logits.shape[0] == targets.shape[0] else 0
        if classes > 1:
            return logits
        least = 2 if isinstance(self.loss, nn.CrossEntropyLoss) else 1
        if classes >= least:
            return logits
        raise UserError(
            f"{type(self.model).__name__} returned {shown(logits)}, but a classification needs logits [N, C], "
            f"C at least {least}, as floating-point numbers, for {len(targets)} samples",
            key="task.model",
            remedy="Let the model's forward return one row of C logits for each sample, or use another task.",
        )

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """Add a batch to the metrics. Return what `forward` returns, and `predictions`: classes `[N]`. No host sync."""
        result = super().evaluate(batch)
        logits = result.get("outputs")
        return {**result, "predictions": logits.argmax(1)} if isinstance(logits, Tensor) else result


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


class Regression(Task):
    """Batches `(inputs [N, ...], targets [N, ...])`; the model returns outputs of the targets' shape and unit.

    The shapes must be equal: for outputs `[N]` and targets `[N, 1]`, torch's losses would compare all pairs.

    Args: as in `Task`.
    """

    def call_model(self, inputs: Any, targets: Tensor) -> Tensor:
        """Return the outputs, in the shape of the targets.

        Raises:
            UserError: the model's output does not have this shape.
        """
        outputs = self.model(inputs)
        if isinstance(outputs, Tensor) and outputs.shape == targets.shape:
            return outputs
        raise UserError(
            f"{type(self.model).__name__} returned {shown(outputs)} for targets {list(targets.shape)}",
            key="task.model",
            remedy="Let the model's forward return one value for each target, in the same shape.",
        )

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """Add a batch to the metrics. Return what `forward` returns, and `predictions`: the outputs. No host sync."""
        result = super().evaluate(batch)
        return {**result, "predictions": result.get("outputs")}
