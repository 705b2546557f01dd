"""task=huggingface, with a model that has the interface of transformers' models."""

from __future__ import annotations

from collections import OrderedDict, UserDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.settings import Settings
from hydraloop.errors import UserError
from hydraloop.tasks import Accuracy, HuggingFace, TokenAccuracy
from tests.ranks import on_ranks

WORDS = 8


class ModelOutput(OrderedDict[str, Any]):
    """As in transformers: a dict without the entries that are None."""

    def __init__(self, **entries: Any) -> None:
        super().__init__({name: value for name, value in entries.items() if value is not None})


class TokenModel(nn.Module):
    """Labels each token; a causal model predicts the next one. The loss is the mean over labels that are not -100."""

    def __init__(self, loss_type: str | None = "ForTokenClassification") -> None:
        super().__init__()
        self.loss_type = loss_type
        self.logits = nn.Embedding(WORDS, WORDS)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Tensor | None = None) -> Any:
        logits, loss = self.logits(input_ids), None
        if labels is not None:
            shifted = self.loss_type in (None, "ForCausalLM")
            scores, targets = (logits[:, :-1], labels[:, 1:]) if shifted else (logits, labels)
            loss = cross_entropy(scores.flatten(0, 1), targets.flatten())
        return ModelOutput(loss=loss, logits=logits, hidden_states=None)


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


@pytest.mark.parametrize("loss_type", ["ForTokenClassification", "ForCausalLM", None])
def test_all_labels_of_tokens_have_the_same_weight(loss_type: str | None) -> None:
    torch.manual_seed(0)
    task = HuggingFace(TokenModel(loss_type), {"accuracy": TokenAccuracy()})
    with torch.no_grad():
        task.model.logits.weight.copy_(torch.eye(WORDS).roll(1, 1))
    batches = [batch_of(2, 3), batch_of(6), batch_of(2, 1, 1)]
    task.reset_metrics()
    for batch in batches:
        task.evaluate(batch)
    whole = {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}
    metrics = task.compute_metrics()
    assert metrics["loss"] == pytest.approx(task.model(**whole)["loss"].item())
    shift = 0 if loss_type == "ForTokenClassification" else 1
    right = (whole["input_ids"][:, : 6 - shift] + 1) % WORDS == whole["labels"][:, shift:]
    count = (whole["labels"][:, shift:] != -100).sum()
    assert metrics["accuracy"] == pytest.approx((right.sum() / count).item())


def train(distributed: Distributed, run_dir: Path, accumulate: int, batches: list[dict[str, Tensor]]) -> Tensor:
    """One epoch on this rank's batches. Return the weights."""
    torch.manual_seed(0)
    task = HuggingFace(TokenModel())
    Engine(
        task=task,
        optimizer=torch.optim.SGD(task.parameters(), lr=1.0),
        loaders=Loaders(batches[distributed.rank :: distributed.world_size]),
        settings=Settings(max_epochs=1, accumulate=accumulate, device="cpu"),
        distributed=distributed,
        run_dir=run_dir,
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


@pytest.mark.parametrize(
    ("batch", "problem"),
    [
        (batch_of(2)["input_ids"], r"a batch is a tensor of shape \[1, 6\], but the model takes keyword arguments"),
        ({"input_ids": batch_of(2)["input_ids"]}, "TokenModel returned no loss for a batch with input_ids"),
    ],
)
def test_a_wrong_batch(batch: Any, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        HuggingFace(TokenModel())(batch)


def test_metrics_without_labels_for_them() -> None:
    task = HuggingFace(TokenModel(), {"accuracy": TokenAccuracy()}, labels="tags")
    task.reset_metrics()
    with pytest.raises(UserError, match="forward returned no targets in eval mode"):
        task.evaluate(batch_of(2))
