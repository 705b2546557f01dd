"""Images of any form as pictures to write. Needs Pillow, which is imported when an image is logged."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hydraloop.engine.records.messages import as_tensor

if TYPE_CHECKING:
    from PIL.Image import Image

_CHANNELS = (1, 3, 4)
_WRITABLE = ("L", "RGB", "RGBA")


def picture(image: Any) -> Image:
    """Return an image as a picture of Pillow.

    Args:
        image: a tensor or array `[H, W]`, `[H, W, C]` or `[C, H, W]` with 1, 3 or 4 channels, on the scale of
            `to_pixels`; a picture of Pillow; or the path of a picture.

    Raises:
        ValueError: the shape is another one.
        OSError: the file is not a picture.
    """
    from PIL import Image

    if isinstance(image, str | os.PathLike):
        with Image.open(image) as opened:
            opened.load()
        image = opened
    if isinstance(image, Image.Image):
        return image if image.mode in _WRITABLE else image.convert("RGB")
    (pixels,) = to_pixels([_channels_first(image)])
    return Image.fromarray((pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)).contiguous().numpy())


def _channels_first(image: Any) -> Tensor:
    """Return a copy `[C, H, W]` on the host. If both ends could be channels, those of a tensor are in front."""
    in_front = isinstance(image, Tensor)
    values = as_tensor(image).cpu()
    if values.ndim == 2:
        return values[None]
    if values.ndim == 3 and values.numel():
        first, last = (values.shape[end] in _CHANNELS for end in (0, -1))
        if first or last:
            return values if first and (in_front or not last) else values.permute(2, 0, 1)
    raise ValueError(f"an image is [H, W], [H, W, 3] or [3, H, W], not {list(values.shape)}")


def to_pixels(images: Sequence[Tensor], mean: Any = None, std: Any = None) -> list[Tensor]:
    """Convert images `[C, H, W]` of any number type to uint8, on a scale guessed from their values.

    With `mean` and `std` (a number, or one per channel), images are denormalised first. uint8, 0..1 and 0..255 keep
    their scale; other values are stretched from the smallest to the largest finite value of all images. Infinities are
    drawn as the largest and smallest value, NaN as the smallest.
    """
    if all(image.dtype == torch.uint8 for image in images):
        return list(images)
    floats = [_denormalised(image.float(), mean, std) for image in images]
    finite = torch.cat([image[image.isfinite()] for image in floats])
    low, high = (finite.min().item(), finite.max().item()) if len(finite) else (0.0, 1.0)
    slack = 1e-3 * max(1.0, abs(high))  # for rounding
    if low >= -slack and high <= 1 + slack:
        low, high = 0.0, 1.0
    elif low >= -slack and 127 < high <= 255 + slack:
        low, high = 0.0, 255.0
    scale = 255 / (high - low) if high > low else 0.0
    drawable = (image.nan_to_num(nan=low, posinf=high, neginf=low) for image in floats)
    return [((image - low) * scale).round().clamp(0, 255).to(torch.uint8) for image in drawable]


def _denormalised(image: Tensor, mean: Any, std: Any) -> Tensor:
    if mean is None or std is None:
        return image
    by_channel = [torch.as_tensor(value, dtype=torch.float32).cpu().flatten() for value in (mean, std)]
    if any(len(values) not in (1, len(image)) for values in by_channel):
        return image  # for other channels
    means, stds = (values.view(-1, 1, 1) for values in by_channel)
    return image * stds + means


_SIDE = 480
"""Pixels of the longer side, without the margin."""
_NUMBERED = 20
"""Up to this many rows and columns, the indices are written."""
_MARGIN = 24
_FONT = 12


def heatmap(matrix: Tensor) -> Image:
    """Return a picture of a matrix `[R, C]`: white is 0, blue the value with the largest magnitude, NaN is grey.

    Up to 20 rows and columns, it shows the indices at the top and left. Host sync.
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
        draw.text((centre(column), edge), str(column), "black", font, anchor="mm")
    return image
