"""Language modelling: the next token at every position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hydraloop.errors import UserError
from hydraloop.tasks.metrics import IGNORED, Metric
from hydraloop.tasks.task import LOSS, OUTPUTS, TARGETS, Task
from hydraloop.tasks.values import shown


class LanguageModeling(Task):
    """Batches `(tokens int64 [N, T], targets int64 [N, T])`; the model returns logits `[N, T, V]`.

    A batch may also be the tokens alone, int64 `[N, T + 1]`, or a list or tuple with only them. Each token is then the
    target of the one before it: the model gets all tokens except the last one, and the targets are all except the first
    one. `predict` passes all of them to the model.

    The loss is the negative log-likelihood in nats, as a sum and a number of targets, so that every target has the same
    weight, no matter how many a batch, a rank or a window has. Targets of -100 (torch's default `ignore_index`) are
    ignored.

    Args:
        model: from tokens to logits.
        metrics: as in `Task`. They are updated with the logits `[N, T, V]` and the targets `[N, T]`.
    """

    def __init__(self, model: nn.Module, metrics: Mapping[str, Metric | None] | None = None) -> None:
        super().__init__(model, nn.CrossEntropyLoss(ignore_index=IGNORED, reduction="sum"), metrics)

    def forward(self, batch: Any) -> dict[str, Any]:
        """Return `{"loss": (sum of the losses, number of targets)}`, both scalar tensors. No host sync.

        In eval mode also `outputs`, the logits `[N, T, V]`, and `targets` `[N, T]`.
        """
        tokens, targets = _tokens_and_targets(batch)
        logits = self.call_model(tokens, targets)
        loss = self._total(logits, targets)
        return {LOSS: loss} if self.training else {LOSS: loss, OUTPUTS: logits, TARGETS: targets}

    def call_model(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the logits `[N, T, V]` of tokens `[N, T]`.

        Raises:
            UserError: the model's output does not have this shape.
        """
        logits = self.model(inputs)
        if isinstance(logits, Tensor) and logits.ndim == 3 and logits.shape[:2] == targets.shape:
            return logits
        raise UserError(
            f"{type(self.model).__name__} returned {shown(logits)} for targets {list(targets.shape)}, but language "
            "modeling needs logits [N, T, V]",
            key="task.model",
            remedy="Let the model's forward return one row of V logits for each token.",
        )

    def _total(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return the sum of the losses, in float32 because bf16 would lose most of them, and their number."""
        return self.compute_loss(logits.flatten(0, 1).float(), targets.flatten()), (targets != IGNORED).sum()


def _tokens_and_targets(batch: Any) -> tuple[Tensor, Tensor]:
    """Return both, also of a batch of tokens alone."""
    if isinstance(batch, tuple | list) and len(batch) == 1:
        (batch,) = batch
    if isinstance(batch, Tensor):
        return batch[:, :-1], batch[:, 1:]
    tokens, targets = batch
    return tokens, targets
