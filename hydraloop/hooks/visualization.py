"""VisualizationHook: draws the model's predictions for the first images of each validation and test."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Mode, Priority
from hydraloop.engine.interval import Every
from hydraloop.engine.loaders import data_sets_with, sets_of
from hydraloop.engine.messages import position
from hydraloop.engine.records import to_pixels
from hydraloop.files.environment import shown
from hydraloop.files.terminal import number
from hydraloop.schemas.option_checks import check_at_least

if TYPE_CHECKING:
    from PIL.Image import Image

log = logging.getLogger(__name__)

_NUMBERS = 3
"""Number of entries of a vector that are shown."""
_Sample = tuple[Tensor, Tensor | None, Tensor | None]
"""An image, its label and its prediction, on the host."""

_GREEN, _RED, _GREY, _BLACK, _WHITE = (0, 115, 80), (200, 50, 0), (150, 150, 150), (20, 20, 20), (255, 255, 255)
"""Green and red from the palette of Okabe and Ito, which colour-blind people can distinguish."""
_FRAME, _GAP, _LINE, _FONT = 3, 6, 17, 14
"""Pixels: the coloured frame, the space around a tile, the height of a line of text and of its letters."""
_LEAST_WIDTH = 112
"""Minimum width of a tile in pixels, so that a name fits below it."""


class VisualizationHook(Hook):
    """Draws images of each validation and test with their labels and predictions, as a PNG file.

    A picture is a grid of images: green if the prediction is right, red if it is wrong. With
    `ema` or `tta` the predictions are theirs, as in the metrics. The file is
    `<run_dir>/media/val/predictions_iter_400.png` or `media/test/…`. All trackers show it as `val/predictions` or
    `test/predictions` (`engine.log_image`). With several data sets, each has a picture: `val/<data set>/predictions`.

    Batches are `(inputs, targets)` with images `[N, 1 or 3, H, W]` of floats or uint8; with other batches the hook
    warns once and draws nothing. Predictions are `outputs["predictions"]`, else for class indices the largest of
    `outputs["outputs"]`, else the outputs. Class indices are shown by name if the data set has `classes`, a list of
    names. Images are denormalised with the data set's `mean` and `std` (one number per channel) if it has them. If
    data sets contain others (`dataset`, `datasets`), the outermost one with the attribute counts; of several, the
    first. uint8, 0..1 and 0..255 are drawn as they are, and other ranges are stretched.

    Priority LOWEST: its record follows that of the metrics. Runs on rank 0 only, with the samples of this rank. Cost: a
    host sync for each batch that is drawn from, to copy its images; none for other batches; drawing 32 images takes
    about 50 ms. No state. Options: `VisualizationHookConf`. From MMEngine's NaiveVisualizationHook, whose `interval`
    counts batches too.
    """

    priority = Priority.LOWEST
    on_error = "warn"
    rank_zero_only = True

    def __init__(self, *, interval: int = 1, num_images: int = 32, size: int = 128) -> None:
        check_at_least(1, interval=interval, num_images=num_images, size=size)
        self._fires_at = Every(interval).fires_at
        self._num_images = num_images
        self._size = size
        self._samples: dict[str, list[_Sample]] = {}
        """By data set."""
        self._has_warned = False

    def after_val_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        self._keep(engine, batch_idx, batch, outputs)

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        self._draw_all(engine, "val", engine.loaders.val)

    def after_test_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        self._keep(engine, batch_idx, batch, outputs)

    def after_test_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        self._draw_all(engine, "test", engine.loaders.test)

    def _keep(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Keep images of the batch, if they are to be drawn."""
        if batch_idx == 0:
            self._samples[engine.evaluator.data_set] = []  # there may be some of an evaluation that was interrupted
        samples = self._samples[engine.evaluator.data_set]
        most = self._num_images - len(samples)
        if most <= 0 or self._has_warned or not self._fires_at(batch_idx + 1):
            return
        if not _has_images(batch):
            self._has_warned = True
            log.warning("%s draws nothing: batches must be (images [N, 1 or 3, H, W], targets)", self.key)
            return
        samples += _samples_of(batch, outputs, most)

    def _draw_all(self, engine: Engine, mode: Mode, loaders: Any) -> None:
        kept, self._samples = self._samples, {}
        for name, loader in sets_of(loaders).items():
            if kept.get(name):
                self._draw(engine, mode, name, loader, kept[name])

    def _draw(self, engine: Engine, mode: Mode, name: str, loader: Any, samples: list[_Sample]) -> None:
        images, labels, predictions = zip(*samples, strict=True)
        classes, mean, std = (_of_data(loader, name) for name in ("classes", "mean", "std"))
        columns = (to_pixels(images, mean, std), labels, predictions)
        tiles = [_tile(*sample, classes) for sample in zip(*columns, strict=True)]
        where = position(engine.progress, mode)
        shown_as = f"{mode} {name}".rstrip()
        title = f"{shown_as}, epoch {where['epoch']}, iteration {where['iteration']}"
        judged = [tile.right for tile in tiles if tile.right is not None]
        if judged:
            title += f": {sum(judged)} of {len(judged)} right"
        prefix = f"{name}/" if name else ""
        path = engine.log_image(f"{mode}/{prefix}predictions", grid(tiles, title, size=self._size))
        if path is not None:
            log.info("%s picture: %s", shown_as, shown(path))


def _has_images(batch: Any) -> bool:
    images = batch[0] if isinstance(batch, Sequence) and batch else None
    return isinstance(images, Tensor) and images.ndim == 4 and images.shape[1] in (1, 3) and images.numel() > 0


def _samples_of(batch: Sequence[Any], outputs: Mapping[str, Any], most: int) -> list[_Sample]:
    """Return the first samples of a batch, at most `most`."""
    targets = batch[1] if len(batch) > 1 else None
    columns = [_first(value, len(batch[0]), most) for value in (batch[0], targets, _predictions(targets, outputs))]
    return list(zip(*columns, strict=True))


def _first(value: Any, count: int, most: int) -> list[Any]:
    """Return the first entries on the host; None for each if the value is not a tensor with one entry per sample.

    A view of the tensor would keep the whole batch alive.
    """
    if not isinstance(value, Tensor) or not value.ndim or len(value) != count:
        return [None] * min(most, count)
    return list(value[:most].detach().to("cpu", copy=True))


def _predictions(targets: Any, outputs: Mapping[str, Any]) -> Any:
    if outputs.get("predictions") is not None:
        return outputs["predictions"]
    found = outputs.get("outputs")
    of_classes = isinstance(targets, Tensor) and targets.ndim == 1 and not targets.is_floating_point()
    return found.argmax(1) if of_classes and isinstance(found, Tensor) and found.ndim == 2 else found


def _tile(pixels: Tensor, label: Tensor | None, prediction: Tensor | None, classes: Any) -> Tile:
    return Tile(pixels, _text(label, classes), _text(prediction, classes), _is_right(label, prediction))


def _is_right(label: Tensor | None, prediction: Tensor | None) -> bool | None:
    """Return whether the prediction is right; None if the two are not classes, or are maps of classes."""
    if label is None or prediction is None or label.is_floating_point() or prediction.is_floating_point():
        return None
    if label.ndim > 1 or label.numel() != prediction.numel():
        return None
    return label.flatten().equal(prediction.flatten().to(label))


def _text(value: Tensor | None, classes: Any) -> str | None:
    """Return the name of a class, or the first numbers."""
    if value is None:
        return None
    values = value.flatten()[: _NUMBERS + 1].tolist()
    if len(values) == 1 and isinstance(values[0], int) and isinstance(classes, list | tuple):
        return str(classes[values[0]]) if 0 <= values[0] < len(classes) else number(values[0])
    return ", ".join(map(number, values[:_NUMBERS])) + (", …" if len(values) > _NUMBERS else "")


def _of_data(loader: Any, attribute: str) -> Any:
    """Return the attribute of the outermost data set that has it, the first of several; else None."""
    found = data_sets_with(attribute, loader, outermost=True)
    return getattr(found[0], attribute) if found else None


# The picture. Pillow is imported when it is drawn. ------------------------------------------------------------------


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
    from PIL import Image, ImageDraw, ImageFont

    font = ImageFont.load_default(_FONT)
    images = [_scaled(tile.pixels, size) for tile in tiles]
    lines = 1 + any(tile.prediction is not None for tile in tiles)
    width = max(_LEAST_WIDTH, *(image.width for image in images)) + 2 * (_FRAME + _GAP)
    height = max(image.height for image in images) + 2 * (_FRAME + _GAP) + lines * _LINE
    columns = min(len(tiles), math.ceil(math.sqrt(2 * len(tiles))))
    top = _LINE + 2 * _GAP
    picture_width = max(columns * width, math.ceil(font.getlength(title)) + 2 * _GAP)
    picture = Image.new("RGB", (picture_width, top + -(-len(tiles) // columns) * height), _WHITE)
    ImageDraw.Draw(picture).text((_GAP, _GAP), title, fill=_BLACK, font=font)
    for index, (tile, image) in enumerate(zip(tiles, images, strict=True)):
        corner = (index % columns * width, top + index // columns * height)
        picture.paste(_framed(tile, image, (width, height), font), corner)
    return picture


def _scaled(pixels: Tensor, size: int) -> Image:
    """Return the image, reduced to `size` or enlarged by the largest whole factor, without new colours."""
    from PIL import Image, ImageOps

    array = pixels[0] if len(pixels) == 1 else pixels.permute(1, 2, 0)
    image = Image.fromarray(array.contiguous().numpy()).convert("RGB")
    image.thumbnail((size, size), Image.Resampling.LANCZOS)  # only reduces
    return ImageOps.scale(image, size // max(image.size), Image.Resampling.NEAREST)


def _framed(tile: Tile, image: Image, size: tuple[int, int], font: Any) -> Image:
    """Return the framed image of a tile; below it the label, then the prediction, cut off at the edge of the tile."""
    from PIL import Image, ImageDraw

    drawn = Image.new("RGB", size, _WHITE)
    draw = ImageDraw.Draw(drawn)
    colour = _GREY if tile.right is None else _GREEN if tile.right else _RED
    left = (size[0] - image.width) // 2 - _FRAME
    draw.rectangle((left, _GAP, left + image.width + 2 * _FRAME - 1, _GAP + image.height + 2 * _FRAME - 1), fill=colour)
    drawn.paste(image, (left + _FRAME, _GAP + _FRAME))
    y = _GAP + image.height + 2 * _FRAME + 1
    if tile.label is not None:
        draw.text((_GAP, y), f"label {tile.label}", fill=_BLACK, font=font)
    if tile.prediction is not None:
        fill = _BLACK if tile.right is None else colour
        draw.text((_GAP, y + _LINE), f"pred {tile.prediction}", fill=fill, font=font)
    return drawn
