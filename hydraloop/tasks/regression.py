"""Regression: one or several numbers for each sample."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hydraloop.errors import UserError
from hydraloop.tasks.task import LOSS, Task


class Regression(Task):
    """Batches `(inputs [N, ...], targets [N, ...])`; the model gives outputs of the targets' shape and unit.

    The shapes have to agree: of outputs `[N]` and targets `[N, 1]`, torch's losses would compare each with each.

    Args: as of `Task`.
    """

    def forward(self, batch: Any) -> dict[str, Tensor]:
        """The loss of a batch: `{"loss": scalar}`. No host sync.

        Raises:
            UserError: the model's output does not have the shape of the targets.
        """
        inputs, targets = batch
        outputs = self.model(inputs)
        if not isinstance(outputs, Tensor) or outputs.shape != targets.shape:
            raise _other_shape(self, outputs, targets)
        return {LOSS: self.loss(outputs, targets)}

    def num_samples(self, batch: Any) -> int:
        """The samples in a batch: the length of its targets. No host sync."""
        samples: int = batch[1].size(0)
        return samples

    def evaluate(self, batch: Any) -> dict[str, Any]:
        """Take a batch into the metrics: `{"loss": scalar, "outputs": [N, ...], "predictions": the same}`.

        No host sync.

        Raises:
            UserError: the model's output does not have the shape of the targets.
        """
        inputs, targets = batch
        outputs = self.model(inputs)
        if not isinstance(outputs, Tensor) or outputs.shape != targets.shape:
            raise _other_shape(self, outputs, targets)
        loss = self.loss(outputs, targets)
        self.update_metrics(loss, outputs, targets, targets.shape[0])
        return {LOSS: loss, "outputs": outputs, "predictions": outputs}


def _other_shape(task: Regression, outputs: object, targets: Tensor) -> UserError:
    got = f"a tensor {list(outputs.shape)}" if isinstance(outputs, Tensor) else f"a {type(outputs).__name__}"
    return UserError(
        f"{type(task.model).__name__} returned {got} for targets {list(targets.shape)}",
        key="task.model",
        remedy="Let the model's forward return one value for each target, in the same shape.",
    )
