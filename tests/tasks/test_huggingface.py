"""task=huggingface, with a model that has the interface of transformers' models."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.errors import UserError
from hydraloop.tasks import Accuracy, HuggingFace, TokenAccuracy
from tests.helpers import make_engine
from tests.ranks import on_ranks

WORDS = 8


class ModelOutput(OrderedDict[str, Any]):
    """As in transformers: a dict without the entries that are None."""

    def __init__(self, **entries: Any) -> None:
        super().__init__({name: value for name, value in entries.items() if value is not None})


class TokenModel(nn.Module):
    """Labels each token; a causal model predicts the next one. The loss is the mean over labels that are not -100."""

    shifts = False
    loss_type: str | None = None  # that of a class which transformers does not know

    def __init__(self) -> None:
        super().__init__()
        self.logits = nn.Embedding(WORDS, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        logits, loss = self.logits(input_ids), None
        if labels is not None:
            scores, targets = (logits[:, :-1], labels[:, 1:]) if self.shifts else (logits, labels)
            loss = cross_entropy(scores.flatten(0, 1), targets.flatten())
        return ModelOutput(loss=loss, logits=logits, hidden_states=None)


class TinyForCausalLM(TokenModel):
    """Predicts the next token, as the two classes below."""

    shifts = True
    loss_type = "ForCausalLM"


class TinyLMHeadModel(TinyForCausalLM):
    """Named as GPT-2's."""


class TinyForConditionalGeneration(TinyForCausalLM):
    """Only a decoder, as of images and texts."""

    config = SimpleNamespace(is_encoder_decoder=False)


class T5ForConditionalGeneration(TokenModel):
    """An encoder and a decoder; the model itself shifts the inputs of the decoder."""

    config = SimpleNamespace(is_encoder_decoder=True)


class Adapted(nn.Module):
    """Has another model inside, as a `PeftModel` without a task type."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = model
        self.logits = model.logits

    def get_base_model(self) -> nn.Module:
        return self.base_model

    def forward(self, **batch: Any) -> Any:
        return self.base_model(**batch)


class SequenceModel(TokenModel):
    """Labels each text."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        logits = self.logits(input_ids).mean(1)
        return ModelOutput(loss=None if labels is None else cross_entropy(logits, labels), logits=logits)


def batch_of(*lengths: int, width: int = 6) -> dict[str, Tensor]:
    """Texts of these lengths, padded to `width`."""
    mask = torch.arange(width) < torch.tensor(lengths).unsqueeze(1)
    ids = torch.randint(WORDS, mask.shape)
    return {"input_ids": ids, "attention_mask": mask.long(), "labels": torch.where(mask, (ids + 1) % WORDS, -100)}


@pytest.mark.parametrize("kind", [dict, UserDict])  # BatchEncoding is a UserDict
def test_the_loss_of_texts_and_their_metrics(kind: Any) -> None:
    torch.manual_seed(0)
    task = HuggingFace(SequenceModel(), {"accuracy": Accuracy()})
    batches = [
        kind(batch_of(2, 3) | {"labels": torch.tensor([1, 2])}),
        kind(batch_of(4) | {"labels": torch.tensor([3])}),
    ]
    assert set(task(batches[0])) == {"loss"}
    task.eval()
    outputs = [task.model(**batch) for batch in batches]
    task.reset_metrics()
    for batch, output in zip(batches, outputs, strict=True):
        result = task.evaluate(batch)
        assert torch.equal(result["outputs"], output["logits"])
        assert result["targets"] is batch["labels"]
    logits, labels = torch.cat([output["logits"] for output in outputs]), torch.tensor([1, 2, 3])
    metrics = task.compute_metrics()
    assert metrics["loss"] == pytest.approx(cross_entropy(logits, labels).item())
    assert metrics["accuracy"] == pytest.approx((logits.argmax(1) == labels).double().mean().item())


class Own(TinyForCausalLM):
    """A custom causal model, whose name does not say so."""


@pytest.mark.parametrize(
    ("model", "shift", "options"),
    [
        (TokenModel, 0, {}),
        (T5ForConditionalGeneration, 0, {}),
        (TinyForCausalLM, 1, {}),
        (TinyLMHeadModel, 1, {}),
        (TinyForConditionalGeneration, 1, {}),
        (lambda: Adapted(TinyLMHeadModel()), 1, {}),
        (Own, 1, {"causal": True}),
    ],
)
def test_all_labels_of_tokens_have_the_same_weight(model: Any, shift: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    task = HuggingFace(model(), {"accuracy": TokenAccuracy()}, **options)
    with torch.no_grad():
        task.model.logits.weight.copy_(torch.eye(WORDS).roll(1, 1))
    batches = [batch_of(2, 3), batch_of(0), batch_of(6), batch_of(2, 1, 1)]
    task.reset_metrics()
    for batch in batches:
        task.evaluate(batch)
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    metrics = task.compute_metrics()
    assert metrics["loss"] == pytest.approx(task.model(**whole)["loss"].item())
    right = (whole["input_ids"][:, : 6 - shift] + 1) % WORDS == whole["labels"][:, shift:]
    count = (whole["labels"][:, shift:] != -100).sum()
    assert metrics["accuracy"] == pytest.approx((right.sum() / count).item())


def test_a_batch_without_labels_changes_nothing() -> None:
    task = HuggingFace(TokenModel())
    total, count = task(batch_of(0))["loss"]
    assert (total.item(), count.item()) == (0, 0)
    total.backward()
    assert not task.model.logits.weight.grad.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_of_the_losses_in_half_precision(dtype: torch.dtype) -> None:
    task = HuggingFace(TokenModel().to(dtype))
    with torch.no_grad():
        task.model.logits.weight.copy_(torch.eye(WORDS) * 300)
        batch = batch_of(*[250] * 4, width=250)
        total, count = task(batch)["loss"]
        assert total.item() == task.model(**batch)["loss"].item() * count.item() > 65504


def train(distributed: Distributed, run_dir: Path, accumulate: int, batches: list[dict[str, Tensor]]) -> Tensor:
    """One epoch on this rank's batches. Return the weights."""
    torch.manual_seed(0)
    task = HuggingFace(TokenModel())
    make_engine(
        run_dir,
        train=batches[distributed.rank :: distributed.world_size],
        task=task,
        lr=1.0,
        distributed=distributed,
        accumulate=accumulate,
    ).train()
    weights: Tensor = task.model.logits.weight.detach()
    return weights


def test_padding_has_no_weight_with_accumulation_and_ranks(tmp_path: Path) -> None:
    torch.manual_seed(1)
    batches = [batch_of(2, 3), batch_of(6, 6), batch_of(1, 1), batch_of(5, 2)]
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    expected = train(Distributed(), tmp_path, 1, [whole])
    torch.testing.assert_close(train(Distributed(), tmp_path, 4, batches), expected)
    for weights in on_ranks(2, train, tmp_path, 2, batches):
        torch.testing.assert_close(weights, expected)


def test_a_batch_without_labels() -> None:
    with pytest.raises(UserError, match="TokenModel returned no loss for a batch with input_ids"):
        HuggingFace(TokenModel())({"input_ids": batch_of(2)["input_ids"]})


def test_metrics_without_labels_for_them() -> None:
    task = HuggingFace(TokenModel(), {"accuracy": TokenAccuracy()}, labels="tags")
    task.reset_metrics()
    with pytest.raises(UserError, match="forward returned no targets in eval mode"):
        task.evaluate(batch_of(2))
