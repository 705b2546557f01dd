"""Augmentation: a data set of images, distorted at random while its strong augmentation is on."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample
from torch.utils.data import Dataset

from hydraloop.errors import UserError


class Augmented(Dataset[Any]):
    """Another data set whose images are moved, turned and partly covered, each one in its own way, anew each time.

    Samples are `(image, ...)`: a floating tensor `[C, H, W]`, whatever follows is left alone. Batches that the other
    data set stacks itself (`__getitems__`) stay stacked. Numbers come from torch's generator of the process that
    loads: in a worker it is seeded by the loader, in the training process by the run.

    The augmentation is a strong one in the sense of the `mode_switch` hook, which switches it off for the last epochs;
    one that is to stay on belongs into the data set inside.

    Args:
        dataset: of images, with a length.
        shift: the farthest an image is moved, in pixels in each direction, 0 or more.
        angle: the farthest it is turned, in degrees either way, 0 or more.
        cutout: the side of the square that is covered with 0 (normalised images: their mean), in pixels, 0 or more;
            its middle is anywhere in the image. Source: T. DeVries and G. Taylor, 2017.
        ramp_epochs: the first epochs, in which the three grow to their full size (1/n, 2/n, …); 0: full at once. Needs
            to be told the epoch: the hook `set_epoch_info` does. Until it is told, it is that of the first.

    Raises:
        UserError: a number is negative; with the first sample: it has no image.
    """

    def __init__(
        self, dataset: Any, shift: float = 1.0, angle: float = 15.0, cutout: int = 2, ramp_epochs: int = 0
    ) -> None:
        for key, number in (("shift", shift), ("angle", angle), ("cutout", cutout), ("ramp_epochs", ramp_epochs)):
            if not number >= 0:
                raise UserError(f"{number} is negative", key=key, remedy="Use 0 to leave it out.")
        self.dataset = dataset
        self.shift, self.angle, self.cutout, self.ramp_epochs = shift, angle, cutout, ramp_epochs
        self.strong = True
        """Whether images are distorted at all."""
        self.strength = min(1.0, 1 / ramp_epochs) if ramp_epochs else 1.0
        """The share of the full size in this epoch, in (0, 1]."""

    @property
    def classes(self) -> Any:
        """Of the data set inside; None where it has none."""
        return getattr(self.dataset, "classes", None)

    def set_strong_augmentation(self, on: bool) -> None:
        """Distort from now on, or leave images as they are."""
        self.strong = on

    def set_epoch(self, epoch: int) -> None:
        """Take the strength of an epoch, counted from 0."""
        self.strength = min(1.0, (epoch + 1) / self.ramp_epochs) if self.ramp_epochs else 1.0

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """One sample."""
        return self._sample(self.dataset[index])

    def __getitems__(self, indices: list[int]) -> Any:
        """One batch, stacked if the data set inside does that; else a list of samples."""
        fetch = getattr(self.dataset, "__getitems__", None)
        fetched = [self.dataset[index] for index in indices] if fetch is None else fetch(indices)
        if isinstance(fetched, list):
            return [self._sample(sample) for sample in fetched]
        return self._batch(fetched)

    def _sample(self, sample: Any) -> Any:
        if not self.strong:
            return sample
        image, *rest = self._with_image(sample)
        return (self._distorted(image[None], "[C, H, W]")[0], *rest)

    def _batch(self, batch: Any) -> Any:
        if not self.strong:
            return batch
        images, *rest = self._with_image(batch)
        return (self._distorted(images, "[N, C, H, W]"), *rest)

    def _with_image(self, sample: Any) -> Any:
        """A sample, or a batch, that begins with a tensor."""
        if isinstance(sample, tuple | list) and sample and isinstance(sample[0], Tensor):
            return sample
        got = f"a {type(sample).__name__}"
        if isinstance(sample, tuple | list) and sample:
            got += f" that begins with a {type(sample[0]).__name__}"
        raise UserError(
            f"{type(self.dataset).__name__} has samples of another form than (image, ...): {got}",
            key="data.train",
            remedy="Let the data set return a tuple whose first entry is a floating tensor [C, H, W].",
        )

    def _distorted(self, images: Tensor, shape: str) -> Tensor:
        """Images `[N, C, H, W]`, each in its own way."""
        if images.ndim != 4 or not images.is_floating_point():
            raise UserError(
                f"{type(self.dataset).__name__} has samples {list(images.shape)} of {images.dtype}, no images {shape}",
                key="data.train",
                remedy="Augment floating images only; convert them in the data set.",
            )
        drawn = torch.rand(5, len(images)) * 2 - 1
        moved = _moved(images, drawn[:2] * self.shift * self.strength, drawn[2] * self.angle * self.strength)
        side = round(self.cutout * self.strength)
        return _covered(moved, (drawn[3:] + 1) / 2, side) if side else moved


def _moved(images: Tensor, shift: Tensor, angle: Tensor) -> Tensor:
    """Each image moved by `shift` `[2, N]` (x and y, in pixels) and turned by `angle` `[N]` (in degrees).

    What comes in from outside has the colour of the nearest edge.
    """
    _, _, height, width = images.shape
    turn = angle * (math.pi / 180)
    cos, sin = turn.cos(), turn.sin()
    # From places in the new image to places in the old one, in units of half the size; turned in units of pixels.
    rows = [cos, -sin * height / width, -shift[0] * 2 / width, sin * width / height, cos, -shift[1] * 2 / height]
    grid = affine_grid(torch.stack(rows, dim=1).view(-1, 2, 3), list(images.shape), align_corners=False)
    return grid_sample(images, grid.to(images.dtype), mode="bilinear", padding_mode="border", align_corners=False)


def _covered(images: Tensor, middle: Tensor, side: int) -> Tensor:
    """Each image with a square of zeros around `middle` `[2, N]`, in 0..1 of the width and the height."""
    _, _, height, width = images.shape
    inside = [
        (torch.arange(size) - (place[:, None] * size - side / 2).round())
        for place, size in zip(middle, (width, height), strict=True)
    ]
    across, down = [(distance >= 0) & (distance < side) for distance in inside]
    return images.masked_fill(down[:, None, :, None] & across[:, None, None, :], 0.0)
