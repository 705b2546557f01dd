"""Tasks with one target for each sample: classification, multi-label classification and regression."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from hydraloop.tasks.metrics import Metric
from hydraloop.tasks.task import LOSS, OUTPUTS, TARGETS, Task
from hydraloop.tasks.values import output_error


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
        least = 2 if isinstance(self.loss, nn.CrossEntropyLoss) else 1
        is_matrix = isinstance(logits, Tensor) and logits.ndim == 2 and logits.is_floating_point()
        if is_matrix and len(logits) == len(targets) and logits.size(1) >= least:
            return logits
        raise output_error(
            self.model,
            logits,
            f"for {len(targets)} samples, but a classification needs logits [N, C], C at least {least}, as "
            "floating-point numbers",
            "Let the model's forward return one row of C logits for each sample, or use another task.",
        )

    def predictions_of(self, outputs: Tensor) -> Tensor:
        """Return the classes `[N]`."""
        return outputs.argmax(1)


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
        raise output_error(
            self.model,
            logits,
            f"for labels {list(targets.shape)}, but with {self.num_classes} classes both are {list(expected)}",
            "Set task.num_classes, and let the model return a logit and the data set a label, 1 or 0, for each class.",
        )

    def predictions_of(self, outputs: Tensor) -> Tensor:
        """Return the labels `[N, C]`."""
        return (outputs > 0.5).long()


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
        raise output_error(
            self.model,
            outputs,
            f"for targets {list(targets.shape)}",
            "Let the model's forward return one value for each target, in the same shape.",
        )

    def predictions_of(self, outputs: Tensor) -> Tensor:
        """Return the outputs."""
        return outputs
