"""Classification: one class for each sample."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hydraloop.errors import UserError
from hydraloop.tasks.task import LOSS, Task


class Classification(Task):
    """Batches `(inputs [N, ...], classes int64 [N])`; the model gives logits `[N, C]`, the loss takes both.

    Args: as in `Task`.
    """

    @property
    def num_classes(self) -> int | None:
        """The number of classes, from the model's `num_classes`; None if it has none."""
        number = getattr(self.model, "num_classes", None)
        return number if isinstance(number, int) else None

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return the loss of a batch: `{"loss": scalar}`. No host sync.

        Raises:
            UserError: the model's output is not a tensor `[N, C]`.
        """
        inputs, classes = batch
        logits = self._logits(inputs)
        return {LOSS: self.loss(logits, classes)}

    def num_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch. No host sync."""
        samples: int = batch[1].size(0)
        return samples

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """Add a batch to the metrics.

        Returns `{"loss": scalar, "outputs": logits [N, C], "predictions": classes [N]}`.

        No host sync.

        Raises:
            UserError: the model's output is not a tensor `[N, C]`.
        """
        inputs, classes = batch
        logits = self._logits(inputs)
        loss = self.loss(logits, classes)
        self.update_metrics(loss, logits, classes, logits.shape[0])
        return {LOSS: loss, "outputs": logits, "predictions": logits.argmax(1)}

    def _logits(self, inputs: Any) -> Tensor:
        logits = self.model(inputs)
        if isinstance(logits, Tensor) and logits.ndim == 2:
            return logits
        got = f"a tensor {list(logits.shape)}" if isinstance(logits, Tensor) else f"a {type(logits).__name__}"
        raise UserError(
            f"{type(self.model).__name__} returned {got}, but a classification needs logits [N, C]",
            key="task.model",
            remedy="Let the model's forward return one row of C logits for each sample, or use another task.",
        )
