"""Classification: one class for each sample."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from hydraloop.errors import UserError
from hydraloop.tasks.task import Task
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
