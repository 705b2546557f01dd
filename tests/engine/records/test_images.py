"""The scale of an image is guessed from its values. Forms of images: see test_objects.py."""

from __future__ import annotations

from typing import Any

import torch

from hydraloop.engine.records import to_pixels


def test_ranges_of_pixels() -> None:
    def seen(*values: float, dtype: torch.dtype = torch.float32, **normalised: Any) -> list[int]:
        (image,) = to_pixels([torch.tensor(values, dtype=dtype).view(1, 1, -1)], **normalised)
        assert image.dtype == torch.uint8
        return image.flatten().tolist()

    assert seen(3, 200, dtype=torch.uint8) == [3, 200]
    assert seen(0.2, 0.6) == [51, 153]
    assert seen(0.0, 10.0, 200.0) == [0, 10, 200]
    assert seen(-1.0, 0.0, 1.0) == [0, 128, 255]
    assert seen(-1.0, 1.0, mean=8.0, std=8.0) == [0, 255], "0 .. 16, as the digits"
    assert seen(0.2, 0.6, dtype=torch.bfloat16) == [51, 153]
    assert seen(0.2, 0.6, float("nan"), float("inf"), -float("inf")) == [51, 153, 0, 255, 0]
    assert seen(-1.0, 0.0, 1.0, float("inf"), -float("inf"), float("nan")) == [0, 128, 255, 255, 0, 0]
    assert seen(float("nan"), float("inf"), -float("inf")) == [0, 255, 0]
    assert seen(-3.0, -3.0) == [0, 0]
    assert seen(0.2, 0.6, mean=[1, 2], std=[1, 2]) == [51, 153], "two numbers do not fit one channel"
    first, second = to_pixels([torch.zeros(1, 2, 2), torch.full((1, 3, 3), 4.0)])
    assert (first.unique().tolist(), second.unique().tolist()) == ([0], [255]), "one scale for all"
