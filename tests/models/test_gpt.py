"""GPT: causality, tied weights, initialisation, its number of operations, and equal results in every way to run it."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from examples.char_lm.gpt import GPT, Block
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.errors import UserError
from hydraloop.schemas.distributed import FSDPConf
from tests.ranks import on_ranks


def tiny(**changed: float) -> GPT:
    torch.manual_seed(0)
    return GPT(**{"vocab_size": 17, "context": 12, "layers": 2, "width": 16, "heads": 4, **changed})  # type: ignore[arg-type]


def tokens(samples: int = 3, length: int = 12, vocab_size: int = 17, seed: int = 0) -> Tensor:
    return torch.randint(vocab_size, (samples, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("samples", "length"), [(3, 12), (1, 1), (2, 5)])
def test_shapes(samples: int, length: int) -> None:
    assert tiny()(tokens(samples, length)).shape == (samples, length, 17)


def test_the_default_size_is_the_documented_one() -> None:
    assert sum(parameter.numel() for parameter in GPT().parameters()) == 836_736


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


def test_the_embedding_is_the_output_layer_under_one_name() -> None:
    model = tiny()
    assert [name for name in model.state_dict() if "embedding" in name or "head" in name] == [
        "token_embedding.weight",
        "position_embedding.weight",
    ]
    assert {parameter.shape for parameter in model.parameters()} >= {torch.Size([17, 16])}
    assert sum(parameter.shape == (17, 16) for parameter in model.parameters()) == 1
    # A token that does not occur has a gradient too, from the output layer.
    model(torch.zeros(1, 4, dtype=torch.int64)).square().sum().backward()
    gradient = model.token_embedding.weight.grad
    assert gradient is not None
    assert gradient[5].any()


def test_every_parameter_has_a_gradient() -> None:
    model = tiny()
    functional.cross_entropy(model(tokens()).flatten(0, 1), tokens(seed=1).flatten()).backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("sizes", "key"),
    [({"layers": 0}, "layers"), ({"vocab_size": 0}, "vocab_size"), ({"width": 18}, "width"), ({"heads": -1}, "heads")],
)
def test_impossible_sizes_are_refused(sizes: dict[str, int], key: str) -> None:
    with pytest.raises(UserError) as caught:
        tiny(**sizes)
    assert caught.value.key == key


@pytest.mark.parametrize(("width", "heads"), [(18, 4), (3, 4), (20, 7)])
def test_the_remedy_for_a_width_works(width: int, heads: int) -> None:
    with pytest.raises(UserError) as caught:
        tiny(width=width, heads=heads)
    proposed = int("".join(filter(str.isdigit, caught.value.remedy or "")))
    assert tiny(width=proposed, heads=heads)(tokens()).shape == (3, 12, 17)


def test_a_sequence_that_is_too_long_is_refused() -> None:
    with pytest.raises(UserError, match="13 tokens") as caught:
        tiny()(tokens(1, 13))
    assert caught.value.key == "task.model.context"


# Generating. ---------------------------------------------------------------------------------------------------------


def test_generated_tokens_continue_the_given_ones_past_the_context() -> None:
    model, given = tiny(), tokens(2, 3)
    written = model.generate(given, 20, generator=torch.Generator().manual_seed(0))
    assert written.shape == (2, 23)
    assert written.dtype == torch.int64
    assert torch.equal(written[:, :3], given)
    assert 0 <= written.min() <= written.max() < 17


def test_temperature_zero_takes_the_most_likely_token() -> None:
    model = tiny().eval()
    written = model.generate(tokens(2, 4), 6, temperature=0.0)
    for position in range(4, 10):
        assert torch.equal(written[:, position], model(written[:, :position])[:, -1].argmax(1))
    assert torch.equal(model.generate(tokens(2, 4), 6, top_k=1), written)


def test_draws_follow_the_probabilities_temperature_and_top_k() -> None:
    model = tiny().eval()
    with torch.no_grad():
        model.token_embedding.weight.mul_(20)  # so that the tokens differ in probability
    given = tokens(1, 2)
    logits = model(given)[0, -1]
    many = given.expand(20_000, 2)
    for temperature, top_k in ((1.0, None), (2.0, None), (1.0, 3)):
        kept = logits if top_k is None else logits.where(logits >= logits.topk(top_k).values[-1], -math.inf)
        expected = (kept / temperature).softmax(0)
        drawn = model.generate(many, 1, temperature, top_k, torch.Generator().manual_seed(0))[:, -1]
        shares = torch.bincount(drawn, minlength=17) / len(drawn)
        torch.testing.assert_close(shares, expected, atol=0.02, rtol=0.0)


def test_the_same_generator_gives_the_same_text_and_the_global_one_is_not_used() -> None:
    model = tiny(dropout=0.5)
    state = torch.get_rng_state()
    first, second = (model.generate(tokens(1, 2), 10, generator=torch.Generator().manual_seed(seed)) for seed in (7, 7))
    assert torch.equal(first, second)
    assert torch.equal(torch.get_rng_state(), state)


# Ways to run it. -----------------------------------------------------------------------------------------------------


def losses_on_a_rank(distributed: Distributed) -> list[float]:
    """Train three steps on this rank's half of the samples; return the loss before each step, and generated tokens."""
    model = tiny()
    distributed.prepare(model)
    assert all(isinstance(block, FSDPModule) for block in model.blocks) == distributed.sharded
    trained = DistributedDataParallel(model) if distributed.world_size > 1 and not distributed.sharded else model
    optimizer = torch.optim.SGD(trained.parameters(), lr=1.0)
    given, targets = (part.chunk(distributed.world_size)[distributed.rank] for part in (tokens(4), tokens(4, seed=1)))
    losses: list[float] = []
    for _ in range(3):
        loss = functional.cross_entropy(trained(given).flatten(0, 1), targets.flatten())
        losses.append(distributed.sum(loss.detach()).item() / distributed.world_size)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return [*losses, *map(float, model.generate(tokens(1, 2), 5, temperature=0.0)[0].tolist())]


@pytest.mark.parametrize(
    "options", [{"strategy": "ddp"}, {"strategy": "fsdp2", "fsdp": FSDPConf(wrap=["Block"])}], ids=["ddp", "fsdp2"]
)
def test_ranks_train_the_tied_weights_as_one_process_does(options: dict[str, Any]) -> None:
    alone = losses_on_a_rank(Distributed())
    for rank in on_ranks(2, losses_on_a_rank, **options):
        assert rank == pytest.approx(alone, abs=1e-5)
    assert alone[2] < alone[0] - 0.05
