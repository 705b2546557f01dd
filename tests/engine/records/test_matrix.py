"""Pictures of matrices."""

from __future__ import annotations

import math

import pytest
import torch

from hydraloop.engine.records import heatmap


def test_the_colour_shows_the_value() -> None:
    image = heatmap(torch.tensor([[100.0, 0.0], [50.0, math.nan]]))
    width, height = image.size
    cells = [image.getpixel((10 + x * width // 2, 10 + y * height // 2)) for y, x in
             ((0, 0), (0, 1), (1, 0), (1, 1))]  # fmt: skip
    assert cells == [(30, 90, 255), (255, 255, 255), (142, 172, 255), (200, 200, 200)]


@pytest.mark.parametrize(
    ("shape", "size"), [((2, 2), (480, 480)), ((3, 6), (480, 240)), ((21, 21), (462, 462)), ((500, 1000), (1000, 500))]
)
def test_small_matrices_are_enlarged(shape: tuple[int, int], size: tuple[int, int]) -> None:
    assert heatmap(torch.rand(shape)).size == size


@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, -3.0])
def test_any_value_can_be_drawn(value: float) -> None:
    assert heatmap(torch.full((2, 2), value)).size == (480, 480)
