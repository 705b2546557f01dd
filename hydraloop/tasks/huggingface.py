"""HuggingFace: models of transformers, which compute their loss themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from hydraloop.errors import UserError
from hydraloop.tasks.metrics import IGNORED, Metric
from hydraloop.tasks.task import LOSS, OUTPUTS, TARGETS, Task
from hydraloop.tasks.values import shown


class HuggingFace(Task):
    """Batches are mappings, which become the keyword arguments of the model; the model returns its loss.

    For labels of tokens (int64 `[N, T]`), every label has the same weight in the loss, no matter how many a batch has.
    Labels of -100 are ignored. A causal language model predicts the next token, so the metrics get the logits without
    the last position, and the labels without the first one.

    Args:
        model: of transformers, or another one that returns a mapping with `loss`.
        metrics: as in `Task`. They are updated with the logits and the labels.
        labels: key of the labels in a batch.
        logits: key of the logits in the model's output.
    """

    def __init__(
        self,
        model: nn.Module,
        metrics: Mapping[str, Metric | None] | None = None,
        labels: str = "labels",
        logits: str = "logits",
    ) -> None:
        super().__init__(model, None, metrics)
        self._labels, self._logits = labels, logits
        # transformers' own default is the loss of causal models, if it does not know the class (GPT2LMHeadModel).
        self._causal = getattr(model, "loss_type", "") in (None, "ForCausalLM")

    def forward(self, batch: Any) -> dict[str, Any]:
        """Return `{"loss": scalar or (sum, number of labels)}`, in eval mode also `outputs` and `targets`.

        No host sync.

        Raises:
            UserError: the batch is not a mapping, or the model returns no loss.
        """
        if not isinstance(batch, Mapping):
            raise UserError(
                f"a batch is {shown(batch)}, but the model takes keyword arguments",
                key="task",
                remedy="Let the data set return dicts, such as {input_ids: …, attention_mask: …, labels: …}.",
            )
        output = self.model(**batch)
        loss = output.get(LOSS) if isinstance(output, Mapping) else None
        if loss is None:
            raise UserError(
                f"{type(self.model).__name__} returned no loss for a batch with {', '.join(map(str, batch))}",
                key="task",
                remedy="Let the batches contain what the model computes its loss from, usually `labels`.",
            )
        logits, labels = output.get(self._logits), batch.get(self._labels)
        if isinstance(labels, Tensor) and labels.ndim > 1 and not labels.is_floating_point():
            if self._causal:
                logits, labels = None if logits is None else logits[:, :-1], labels[:, 1:]
            count = (labels != IGNORED).sum()
            loss = (loss * count, count)
        found = {} if self.training else {OUTPUTS: logits, TARGETS: labels}
        return {LOSS: loss, **{name: value for name, value in found.items() if value is not None}}
