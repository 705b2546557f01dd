"""Regression: one or several numbers for each sample."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hydraloop.errors import UserError
from hydraloop.tasks.task import Task, shown


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

    def num_samples(self, batch: Any) -> int:
        """Return the number of samples in a batch. No host sync."""
        samples: int = batch[1].size(0)
        return samples

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """Add a batch to the metrics. No host sync.

        Returns `{"loss": scalar, "outputs": [N, ...], "predictions": the outputs}`.
        """
        result = super().evaluate(batch)
        return {**result, "predictions": result["outputs"]}
