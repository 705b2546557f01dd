"""Regression: one or several numbers for each sample."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hydraloop.errors import UserError
from hydraloop.tasks.task import LOSS, Task


class Regression(Task):
    """Batches `(inputs [N, ...], targets [N, ...])`; the model gives outputs of the targets' shape and unit.

    The shapes must be equal: of outputs `[N]` and targets `[N, 1]`, torch's losses would compare all pairs.

    Args: as in `Task`.
    """

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """Return the loss of a batch: `{"loss": scalar}`. No host sync.

        Raises:
            UserError: the model's output does not have the shape of the targets.
        """
        inputs, targets = batch
        outputs = self._outputs(inputs, targets)
        return {LOSS: self.loss(outputs, targets)}

    def num_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch. No host sync."""
        samples: int = batch[1].size(0)
        return samples

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """Add a batch to the metrics and return `{"loss": scalar, "outputs": [N, ...], "predictions": the same}`.

        No host sync.

        Raises:
            UserError: the model's output does not have the shape of the targets.
        """
        inputs, targets = batch
        outputs = self._outputs(inputs, targets)
        loss = self.loss(outputs, targets)
        self.update_metrics(loss, outputs, targets, targets.shape[0])
        return {LOSS: loss, "outputs": outputs, "predictions": outputs}

    def _outputs(self, inputs: Any, targets: Tensor) -> Tensor:
        outputs = self.model(inputs)
        if isinstance(outputs, Tensor) and outputs.shape == targets.shape:
            return outputs
        got = f"a tensor {list(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
        raise UserError(
            f"{type(self.model).__name__} returned {got} for targets {list(targets.shape)}",
            key="task.model",
            remedy="Let the model's forward return one value for each target, in the same shape.",
        )
