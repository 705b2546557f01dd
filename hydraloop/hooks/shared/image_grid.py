"""Draws a grid of images with captions. Needs Pillow, which is imported when it draws."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image
    from PIL.ImageDraw import ImageDraw

_GREEN, _RED, _GREY, _BLACK, _WHITE = (0, 115, 80), (200, 50, 0), (150, 150, 150), (20, 20, 20), (255, 255, 255)
"""Green and red from the palette of Okabe and Ito, which colour-blind people can distinguish."""
_FRAME, _GAP, _LINE, _FONT = 3, 6, 17, 14
"""Pixels: the coloured frame, the space around a tile, the height of a line of text and of its letters."""
_LEAST_WIDTH = 112
"""Minimum width of a tile in pixels, so that a name fits below it."""


@dataclass(frozen=True)
class Tile:
    """One sample of a picture."""

    pixels: Tensor
    """uint8 `[3, H, W]` or `[1, H, W]`."""
    label: str | None
    prediction: str | None
    right: bool | None
    """Whether the two are equal; None if they are not comparable (numbers, or one is missing)."""


def grid(tiles: Sequence[Tile], title: str, *, size: int) -> Image:
    """Arrange the tiles in rows, about twice as many columns as rows, below a title.

    Args:
        tiles: at least one.
        size: pixels of each image's longer side, which is reduced to it or enlarged by the largest whole factor.
    """
    from PIL import Image, ImageDraw

    images = [_scaled(tile.pixels, size) for tile in tiles]
    width = max(_LEAST_WIDTH, *(image.width for image in images)) + 2 * (_FRAME + _GAP)
    lines = 1 + any(tile.prediction is not None for tile in tiles)
    height = max(image.height for image in images) + 2 * (_FRAME + _GAP) + lines * _LINE
    columns = min(len(tiles), math.ceil(math.sqrt(2 * len(tiles))))
    top = _LINE + 2 * _GAP
    picture_width = max(columns * width, math.ceil(_font().getlength(title)) + 2 * _GAP)
    picture = Image.new("RGB", (picture_width, top + -(-len(tiles) // columns) * height), _WHITE)
    draw = ImageDraw.Draw(picture)
    draw.text((_GAP, _GAP), title, fill=_BLACK, font=_font())
    for index, (tile, image) in enumerate(zip(tiles, images, strict=True)):
        corner = (index % columns * width + _GAP, top + index // columns * height + _GAP)
        _put(picture, draw, corner, width - 2 * _GAP, tile, image)
    return picture


def _scaled(pixels: Tensor, size: int) -> Image:
    """Return the image, reduced to `size` or enlarged by the largest whole factor, without new colours."""
    from PIL import Image, ImageOps

    array = pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)
    image = Image.fromarray(array.contiguous().numpy()).convert("RGB")
    image.thumbnail((size, size), Image.Resampling.LANCZOS)  # only reduces
    return ImageOps.scale(image, size // max(image.size), Image.Resampling.NEAREST)


def _put(picture: Image, draw: ImageDraw, corner: tuple[int, int], width: int, tile: Tile, image: Image) -> None:
    """Draw a framed image in the centre of its place; below it the label, then the prediction with its sign."""
    left, top = corner
    colour = _GREY if tile.right is None else _GREEN if tile.right else _RED
    x = left + (width - image.width) // 2 - _FRAME
    draw.rectangle((x, top, x + image.width + 2 * _FRAME - 1, top + image.height + 2 * _FRAME - 1), fill=colour)
    picture.paste(image, (x + _FRAME, top + _FRAME))
    y = top + image.height + 2 * _FRAME + 1
    if tile.label is not None:
        draw.text((left, y), _cut(f"label {tile.label}", width), fill=_BLACK, font=_font())
    if tile.prediction is None:
        return
    y += _LINE
    indent = 0 if tile.right is None else _LINE
    if tile.right is not None:
        _sign(draw, (left, y + 2), tile.right, colour)
    text = _cut(f"pred {tile.prediction}", width - indent)
    draw.text((left + indent, y), text, fill=_BLACK if tile.right is None else colour, font=_font())


def _sign(draw: ImageDraw, corner: tuple[int, int], right: bool, colour: tuple[int, int, int]) -> None:
    """Draw a tick or a cross, for readers who do not see the colour."""
    x, y = corner
    if right:
        draw.line((x + 1, y + 7, x + 5, y + 11, x + 12, y + 2), fill=colour, width=2)
    else:
        draw.line((x + 2, y + 2, x + 11, y + 11), fill=colour, width=2)
        draw.line((x + 2, y + 11, x + 11, y + 2), fill=colour, width=2)


def _cut(text: str, width: int) -> str:
    """Shorten the text to a width in pixels."""
    if _font().getlength(text) <= width:
        return text
    while text and _font().getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"


@functools.cache
def _font() -> Any:
    from PIL import ImageFont

    return ImageFont.load_default(_FONT)
