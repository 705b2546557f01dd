"""Matrices as pictures: the confusion matrix of a validation. Needs Pillow, which is imported when one is drawn."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image

_SIDE = 480
"""Pixels of the longer side, without the margin."""
_NUMBERED = 20
"""Up to this many rows and columns, the values and the indices are written."""
_MARGIN = 24
_FONT = 12


def heatmap(matrix: Tensor) -> Image:
    """Return a picture of a matrix `[R, C]`: white is 0, blue the value with the largest magnitude, NaN is grey.

    Up to 20 rows and columns, it shows the values, and the indices at the top and left. Host sync.
    """
    from PIL import Image, ImageDraw, ImageFont

    values = matrix.detach().double().cpu()
    rows, columns = values.shape
    cell = max(_SIDE // max(rows, columns), 1)
    margin = _MARGIN if max(rows, columns) <= _NUMBERED else 0
    magnitudes = values.abs()
    largest = magnitudes.nan_to_num(nan=0, posinf=0).max()
    shades = (magnitudes / largest.clamp(min=1e-300)).clamp(max=1)
    colours = 255 - shades[..., None] * torch.tensor([225.0, 165.0, 0.0])
    colours[values.isnan()] = 200
    pixels = Image.fromarray(colours.to(torch.uint8).numpy())
    image = Image.new("RGB", (margin + columns * cell, margin + rows * cell), "white")
    image.paste(pixels.resize((columns * cell, rows * cell), Image.Resampling.NEAREST), (margin, margin))
    if not margin:
        return image

    draw, font, edge = ImageDraw.Draw(image), ImageFont.load_default(_FONT), margin / 2

    def centre(index: int) -> float:
        return margin + (index + 0.5) * cell

    for row in range(rows):
        draw.text((edge, centre(row)), str(row), "black", font, anchor="mm")
        for column in range(columns):
            text = "white" if shades[row, column] > 0.6 else "black"
            draw.text((centre(column), centre(row)), f"{values[row, column]:.4g}", text, font, anchor="mm")
    for column in range(columns):
        draw.text((centre(column), edge), str(column), "black", font, anchor="mm")
    return image
