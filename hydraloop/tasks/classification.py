"""Classification: one class for each sample."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hydraloop.errors import UserError
from hydraloop.tasks.task import LOSS, Task


class Classification(Task):
    """Batches `(inputs [N, ...], classes int64 [N])`; the model gives logits `[N, C]`, the loss takes both.

    Args: as of `Task`.
    """

    @property
    def num_classes(self) -> int | None:
        """The classes the model tells apart, from its own `num_classes`; None where it has none."""
        number = getattr(self.model, "num_classes", None)
        return number if isinstance(number, int) else None

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """The loss of a batch: `{"loss": scalar}`. No host sync.

        Raises:
            UserError: the model's output is no tensor `[N, C]`.
        """
        inputs, classes = batch
        logits = self.model(inputs)
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            raise _no_logits(self, logits)
        return {LOSS: self.loss(logits, classes)}

    def num_samples(self, batch: Any) -> int:
        """The samples in a batch: the length of its classes. No host sync."""
        samples: int = batch[1].size(0)
        return samples

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """Take a batch into the metrics: `{"loss": scalar, "outputs": logits [N, C], "predictions": classes [N]}`.

        No host sync.

        Raises:
            UserError: the model's output is no tensor `[N, C]`.
        """
        inputs, classes = batch
        logits = self.model(inputs)
        if not isinstance(logits, Tensor) or logits.ndim != 2:
            raise _no_logits(self, logits)
        loss = self.loss(logits, classes)
        self.update_metrics(loss, logits, classes, logits.shape[0])
        return {LOSS: loss, "outputs": logits, "predictions": logits.argmax(1)}


def _no_logits(task: Classification, outputs: object) -> UserError:
    got = f"a tensor {list(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
    return UserError(
        f"{type(task.model).__name__} returned {got}, but a classification needs logits [N, C]",
        key="task.model",
        remedy="Let the model's forward return one row of C logits for each sample, or use a task of your own.",
    )
