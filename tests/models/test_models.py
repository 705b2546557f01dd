"""The built-in models: shapes, and that every parameter learns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hydraloop.examples import Digits
from hydraloop.models import MLP, SmallCNN


@pytest.mark.parametrize("size", [(8, 8), (4, 4), (7, 12)])
def test_small_cnn_shapes(size: tuple[int, int]) -> None:
    model = SmallCNN(3, 5, width=4)
    assert model(torch.randn(2, 3, *size)).shape == (2, 5)
    assert model.num_classes == 5


def test_mlp_shapes() -> None:
    assert MLP(6, 2, 0.0, 1.0, hidden=[8, 4])(torch.randn(3, 6)).shape == (3, 2)
    linear = MLP(6, 2, 0.0, 1.0, hidden=[])
    assert [type(layer) for layer in linear.layers] == [nn.Linear]


def test_mlp_scales_its_output() -> None:
    torch.manual_seed(0)
    plain, scaled = MLP(4, 1, 0.0, 1.0, dropout=0.0), MLP(4, 1, 150.0, 70.0, dropout=0.0)
    scaled.load_state_dict(plain.state_dict())
    inputs = torch.randn(3, 4)
    assert torch.allclose(scaled(inputs), plain(inputs) * 70 + 150)


@pytest.mark.parametrize(
    ("model", "inputs"), [(SmallCNN(1, 10), torch.randn(4, 1, 8, 8)), (MLP(4, 1, 0.0, 1.0), torch.randn(4, 4))]
)
def test_every_parameter_has_a_gradient(model: nn.Module, inputs: torch.Tensor) -> None:
    model(inputs).square().sum().backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())


@pytest.mark.parametrize("model", [SmallCNN(1, 10, dropout=0.5), MLP(64, 10, 0.0, 1.0, dropout=0.5)])
def test_dropout_is_for_training_only(model: nn.Module) -> None:
    inputs = torch.randn(4, 1, 8, 8) if isinstance(model, SmallCNN) else torch.randn(4, 64)
    model.train()
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


def test_small_cnn_learns_the_digits() -> None:
    torch.manual_seed(0)
    digits = Digits("train")
    model = SmallCNN(1, 10)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    for step in range(40):
        chosen = slice(step * 30, (step + 1) * 30)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(digits.inputs[chosen]), digits.targets[chosen]).backward()
        optimizer.step()
    model.eval()
    val = Digits("val")
    accuracy = (model(val.inputs).argmax(1) == val.targets).float().mean().item()
    assert accuracy > 0.9
