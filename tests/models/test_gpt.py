"""GPT: causality, tied weights, initialisation, its number of operations, and equal results in every way to run it."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from examples.char_lm.gpt import GPT, Block


def tiny(**changed: float) -> GPT:
    torch.manual_seed(0)
    return GPT(**{"vocab_size": 17, "context": 12, "layers": 2, "width": 16, "heads": 4, **changed})  # type: ignore[arg-type]


def tokens(samples: int = 3, length: int = 12, vocab_size: int = 17, seed: int = 0) -> Tensor:
    return torch.randint(vocab_size, (samples, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("samples", "length"), [(3, 12), (1, 1), (2, 5)])
def test_shapes(samples: int, length: int) -> None:
    assert tiny()(tokens(samples, length)).shape == (samples, length, 17)


def test_a_position_sees_itself_and_those_before_it_only() -> None:
    model = tiny().eval()
    given = tokens()
    before = model(given)
    changed = given.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 17
    after = model(changed)
    torch.testing.assert_close(after[:, :7], before[:, :7])
    assert all((after[:, position] - before[:, position]).abs().max() > 1e-6 for position in range(7, 12))


def test_against_attention_and_norms_written_out() -> None:
    """The whole forward pass, written with matrix products."""
    model = tiny().eval()
    with torch.no_grad():  # with the initial values, a mistake in the blocks has little effect
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)) * 0.2)
    given = tokens()

    def norm(features: Tensor, layer: nn.LayerNorm) -> Tensor:
        centred = features - features.mean(-1, keepdim=True)
        return centred / (centred.square().mean(-1, keepdim=True) + layer.eps).sqrt() * layer.weight

    features = model.token_embedding.weight[given] + model.position_embedding.weight
    for block in model.blocks:
        assert isinstance(block, Block)
        parts = (norm(features, block.attention_norm) @ block.attention.query_key_value.weight.T).split(16, dim=-1)
        query, key, value = (part.unflatten(-1, (4, 4)).transpose(1, 2) for part in parts)
        scores = query @ key.transpose(-1, -2) / math.sqrt(4)
        later = torch.ones(12, 12, dtype=torch.bool).triu(1)
        mixed = scores.masked_fill(later, -math.inf).softmax(-1) @ value
        features = features + mixed.transpose(1, 2).flatten(2) @ block.attention.project.weight.T
        hidden = norm(features, block.mlp_norm) @ block.expand.weight.T
        features = features + functional.gelu(hidden) @ block.contract.weight.T
    expected = norm(features, model.norm) @ model.token_embedding.weight.T
    torch.testing.assert_close(model(given), expected, atol=1e-4, rtol=1e-4)


# Generating. ---------------------------------------------------------------------------------------------------------


def test_generated_tokens_continue_the_given_ones_past_the_context() -> None:
    model, given = tiny(), tokens(2, 3)
    written = model.generate(given, 20, generator=torch.Generator().manual_seed(0))
    assert written.shape == (2, 23)
    assert written.dtype == torch.int64
    assert torch.equal(written[:, :3], given)
    assert 0 <= written.min() <= written.max() < 17


# Ways to run it. -----------------------------------------------------------------------------------------------------
