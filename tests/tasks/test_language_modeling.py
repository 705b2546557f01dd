"""Language modelling: the loss as sum and count, ignored targets, metrics by token, and errors."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.char_lm.gpt import GPT
from hydraloop.errors import UserError
from hydraloop.tasks import BitsPerToken, LanguageModeling, TokenAccuracy
from tests.helpers import HostSyncs


class Bigrams(nn.Module):
    """Logits of the next token that depend only on the token."""

    def __init__(self, vocab_size: int = 5) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(vocab_size, vocab_size, generator=generator))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.table[tokens]


class Returns(nn.Module):
    """A model that returns a fixed value."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self.answer = answer

    def forward(self, tokens: Tensor) -> Any:
        return self.answer


def batch(samples: int = 3, length: int = 4, seed: int = 0, ignored: Sequence[tuple[int, int]] = ()) -> Any:
    generator = torch.Generator().manual_seed(seed)
    tokens, targets = torch.randint(5, (2, samples, length), generator=generator)
    for place in ignored:
        targets[place] = -100
    return tokens, targets


def task(**metrics: Any) -> LanguageModeling:
    return LanguageModeling(Bigrams(), metrics)


# Training. -----------------------------------------------------------------------------------------------------------


def test_the_loss_is_a_sum_and_a_count() -> None:
    made, (tokens, targets) = task(), batch()
    outputs = made((tokens, targets))
    assert set(outputs) == {"loss"}
    total, count = outputs["loss"]
    assert (total.shape, count.shape) == ((), ())
    assert count.item() == 12
    expected = functional.cross_entropy(made.model(tokens).flatten(0, 1), targets.flatten())
    assert (total / count).item() == pytest.approx(expected.item(), rel=1e-6)
    total.backward()
    assert not count.requires_grad
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in made.parameters())


def test_a_batch_of_ignored_targets_has_a_loss_of_zero() -> None:
    made = task()
    total, count = made((torch.zeros(1, 2, dtype=torch.int64), torch.full((1, 2), -100)))["loss"]
    assert (total.item(), count.item()) == (0, 0)
    total.backward()
    assert all(parameter.grad is not None and not parameter.grad.any() for parameter in made.parameters())


def test_parts_of_a_batch_add_up_to_its_gradient() -> None:
    """Needed for accumulation and ranks: unequal parts, unequal counts."""
    whole, parts = task(), task()
    everything = batch(5, ignored=[(0, 0), (0, 1), (0, 2), (4, 1)])
    total, count = whole(everything)["loss"]
    (total / count).backward()
    counts = []
    for part in (slice(0, 1), slice(1, 5)):
        partial, number = parts(tuple(tensor[part] for tensor in everything))["loss"]
        partial.backward()
        counts.append(number.item())
    assert counts == [1, 15]
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(one.grad, other.grad / sum(counts))


def test_the_sum_is_in_single_precision_under_autocast() -> None:
    made = LanguageModeling(GPT(context=64, layers=1, width=16, heads=2))
    tokens, targets = torch.randint(256, (2, 32, 64), generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", torch.bfloat16):
        total, count = made((tokens, targets))["loss"]
    assert total.dtype == torch.float32
    assert (total / count).item() == pytest.approx(math.log(256), rel=2e-3)


def test_samples_are_sequences() -> None:
    assert task().num_samples(batch(7, 2)) == 7


def test_tokens_alone_are_their_own_targets() -> None:
    made, pair = task(), task()
    text = torch.randint(5, (2, 7), generator=torch.Generator().manual_seed(0))
    expected = pair((text[:, :-1], text[:, 1:]))["loss"]
    for given in (text, [text]):
        assert made(given)["loss"] == expected
        assert made.num_samples(given) == 2
        assert torch.equal(made.predict(given), made.model(text[:, :-1])), "as in an evaluation"


# Evaluation. ---------------------------------------------------------------------------------------------------------


def test_metrics_and_loss_weight_tokens_equally() -> None:
    made = task(bits_per_token=BitsPerToken(), accuracy=TokenAccuracy())
    batches = [batch(3), batch(1, seed=1, ignored=[(0, 0), (0, 2), (0, 3)])]
    made.reset_metrics()
    outputs = [made.evaluate(one) for one in batches]
    metrics = made.compute_metrics()
    logits = torch.cat([made.model(tokens).flatten(0, 1) for tokens, _ in batches])
    targets = torch.cat([targets.flatten() for _, targets in batches])
    nats = functional.cross_entropy(logits, targets).item()
    correct = (logits.argmax(1) == targets)[targets != -100]
    assert list(metrics) == ["bits_per_token", "accuracy", "loss"]
    assert len(correct) == 13
    assert metrics["loss"] == pytest.approx(nats, rel=1e-6)
    assert metrics["bits_per_token"] == pytest.approx(nats / math.log(2), rel=1e-6)
    assert metrics["accuracy"] == pytest.approx(correct.double().mean().item())
    assert 0 < metrics["accuracy"] < 1
    own = functional.cross_entropy(logits[:12], targets[:12]).item()
    assert outputs[0]["loss"].item() == pytest.approx(own, rel=1e-6)
    assert outputs[0]["outputs"].shape == (3, 4, 5)


def test_a_batch_without_targets_does_not_spoil_the_rest() -> None:
    made = task(bits_per_token=BitsPerToken(), accuracy=TokenAccuracy())
    made.reset_metrics()
    made.evaluate(batch())
    before = made.compute_metrics()
    made.evaluate((torch.zeros(1, 2, dtype=torch.int64), torch.full((1, 2), -100)))
    assert made.compute_metrics() == before


def test_higher_is_better() -> None:
    made = task(bits_per_token=BitsPerToken(), accuracy=TokenAccuracy())
    assert [made.higher_is_better(name) for name in made.metric_names] == [False, True, False]


def test_no_iteration_waits_for_the_device() -> None:
    made = task(bits_per_token=BitsPerToken(), accuracy=TokenAccuracy())
    made.reset_metrics()
    with HostSyncs() as syncs:
        made(batch(ignored=[]))
        made.evaluate(batch(ignored=[]))
    assert syncs.count == 0


# Mistakes. -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "a NoneType"),
        (torch.zeros(3, 5), r"a tensor of shape \[3, 5\]"),
        (torch.zeros(3, 3, 5), r"a tensor of shape \[3, 3, 5\] for targets \[3, 4\]"),
    ],
)
def test_a_model_that_does_not_return_logits_is_refused(answer: Any, said: str) -> None:
    made = LanguageModeling(Returns(answer))
    made.reset_metrics()
    for method in (made.forward, made.evaluate):
        with pytest.raises(UserError, match=f"Returns returned {said}") as caught:
            method(batch())
        assert caught.value.key == "task.model"
