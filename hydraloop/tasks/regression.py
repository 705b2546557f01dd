"""Regression: one or several numbers for each sample."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hydraloop.errors import UserError
from hydraloop.tasks.task import Task
from hydraloop.tasks.values import shown


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
