"""The built-in models: shapes, and that every parameter learns."""

from __future__ import annotations

import pytest
import torch
from torch import nn

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
