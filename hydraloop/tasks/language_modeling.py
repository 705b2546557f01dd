"""Tasks on text: the next token at every position, and models of transformers that compute their loss themselves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hydraloop.errors import UserError
from hydraloop.tasks.metrics import IGNORED, Metric
from hydraloop.tasks.task import LOSS, OUTPUTS, TARGETS, Task
from hydraloop.tasks.values import output_error


class LanguageModeling(Task):
    """Batches `(tokens int64 [N, T], targets int64 [N, T])`; the model returns logits `[N, T, V]`.

    A batch may also be the tokens alone, int64 `[N, T + 1]`, or a list or tuple with only them. Each token is then the
    target of the one before it: the model gets all tokens except the last one, and the targets are all except the first
    one, also in `predict`.

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

    def predict(self, batch: Any) -> Any:
        """Return the model's output for the tokens that it gets in an evaluation."""
        return self.model(_tokens_and_targets(batch)[0])

    def call_model(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the logits `[N, T, V]` of tokens `[N, T]`.

        Raises:
            UserError: the model's output does not have this shape.
        """
        logits = self.model(inputs)
        if isinstance(logits, Tensor) and logits.ndim == 3 and logits.shape[:2] == targets.shape:
            return logits
        raise output_error(
            self.model,
            logits,
            f"for targets {list(targets.shape)}, but language modeling needs logits [N, T, V]",
            "Let the model's forward return one row of V logits for each token.",
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
        causal: whether the model is a causal language model. None: if its class is named `…ForCausalLM` or
            `…LMHeadModel`, or `…ForConditionalGeneration` and it has no encoder (`config.is_encoder_decoder`).
    """

    def __init__(
        self,
        model: nn.Module,
        metrics: Mapping[str, Metric | None] | None = None,
        labels: str = "labels",
        logits: str = "logits",
        causal: bool | None = None,
    ) -> None:
        super().__init__(model, None, metrics)
        self._labels, self._logits = labels, logits
        self._causal = _is_causal(model) if causal is None else causal

    def forward(self, batch: Any) -> dict[str, Any]:
        """Return `{"loss": scalar or (sum, number of labels)}`, in eval mode also `outputs` and `targets`.

        No host sync.

        Raises:
            UserError: the model returns no loss.
        """
        output = self.model(**batch)
        loss = output.get(LOSS) if isinstance(output, Mapping) else None
        if loss is None:
            raise UserError(
                f"{type(self.model).__name__} returned no loss for a batch with {', '.join(map(str, batch))}",
                key="task",
                remedy="Let the batches contain what the model computes its loss from, usually `labels`.",
            )
        logits, labels = output.get(self._logits), batch.get(self._labels)
        tokens = self._labels_of_tokens(batch)
        if tokens is not None:
            if self._causal and logits is not None:
                logits = logits[:, :-1]
            labels, count = tokens, (tokens != IGNORED).sum()
            # The mean over no labels is NaN. A sum in half precision is infinite above 65504.
            loss = (torch.where(count > 0, loss * count.float(), 0.0), count)
        found = {} if self.training else {OUTPUTS: logits, TARGETS: labels}
        return {LOSS: loss, **{name: value for name, value in found.items() if value is not None}}

    def _labels_of_tokens(self, batch: Any) -> Tensor | None:
        """Return the labels over which the model's loss is the mean, `[N, T]`; None without labels of tokens."""
        labels = batch.get(self._labels)
        if not isinstance(labels, Tensor) or labels.ndim < 2 or labels.is_floating_point():
            return None
        return labels[:, 1:] if self._causal else labels

    def predict(self, batch: Any) -> dict[str, Tensor]:
        """Return all outputs of the model that have an entry for each sample. Labels are left out."""
        output = self.model(**{name: value for name, value in batch.items() if name != self._labels})
        samples = self.num_samples(batch)
        outputs = output.items() if isinstance(output, Mapping) else [(self._logits, output)]
        return {
            name: value
            for name, value in outputs
            if isinstance(value, Tensor) and value.ndim and value.size(0) == samples
        }


def _is_causal(model: nn.Module) -> bool:
    # The name, because the loss_type of transformers is None both for GPT2LMHeadModel and for classes it does not know.
    if callable(inner := getattr(model, "get_base_model", None)):  # a PeftModel may have no task in its name
        model = inner()
    name = type(model).__name__
    if name.endswith("ForConditionalGeneration"):
        return not getattr(getattr(model, "config", None), "is_encoder_decoder", False)
    return name.endswith(("ForCausalLM", "LMHeadModel"))
