"""A data set that distorts the images of another at random."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import affine_grid, grid_sample
from torch.utils.data import Dataset

from hydraloop.errors import UserError


class Augmented(Dataset[Any]):
    """Moves, turns and partly covers the images of another data set, each image differently each time.

    Samples are `(image, ...)` with a floating-point tensor `[C, H, W]`; the rest is not changed. Batches that the other
    data set has stacked (`__getitems__`) stay stacked. Random numbers come from torch's global generator, which the
    loader seeds for each batch.

    The hook `mode_switch` can switch this augmentation off for the last epochs. Put an augmentation that should stay on
    into the other data set.

    Args:
        dataset: of images. It must have a length.
        shift: largest movement in each direction, in pixels, 0 or more.
        angle: largest rotation in each direction, in degrees, 0 or more.
        cutout: side of a square that is set to 0 (the mean of normalised images), in pixels, 0 or more. Its center is
            anywhere in the image. Source: T. DeVries and G. Taylor, 2017.
        ramp_epochs: number of epochs in which the three grow to their full size (1/n, 2/n, …); 0: full from the
            start. The loader sets the epoch.

    Raises:
        UserError: a number is negative. With the first sample: it does not have an image.
    """

    def __init__(
        self, dataset: Any, shift: float = 1.0, angle: float = 15.0, cutout: int = 2, ramp_epochs: int = 0
    ) -> None:
        for key, number in (("shift", shift), ("angle", angle), ("cutout", cutout), ("ramp_epochs", ramp_epochs)):
            if not number >= 0:
                raise UserError(f"{number} is negative", key=key, remedy="Use 0 to switch it off.")
        self.dataset = dataset
        self.shift, self.angle, self.cutout, self.ramp_epochs = shift, angle, cutout, ramp_epochs
        self.strong = True
        """Whether images are distorted."""
        self.set_epoch(0)

    @property
    def classes(self) -> Any:
        """The classes of the other data set; None if it has none."""
        return getattr(self.dataset, "classes", None)

    def set_strong_augmentation(self, on: bool) -> None:
        """Switch the distortion on or off."""
        self.strong = on

    def set_epoch(self, epoch: int) -> None:
        """Set the strength for an epoch, counted from 0."""
        self.strength = min(1.0, (epoch + 1) / self.ramp_epochs) if self.ramp_epochs else 1.0
        """Fraction of the full size in this epoch, in (0, 1]."""

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:
        """Return one sample."""
        return self._distorted(self.dataset[index])

    def __getitems__(self, indices: list[int]) -> Any:
        """Return one batch: stacked, if the other data set stacks it, otherwise a list of samples."""
        fetch = getattr(self.dataset, "__getitems__", None)
        fetched = [self.dataset[index] for index in indices] if fetch is None else fetch(indices)
        if isinstance(fetched, list):
            return [self._distorted(sample) for sample in fetched]
        return self._distorted(fetched, stacked=True)

    def _distorted(self, sample: Any, *, stacked: bool = False) -> Any:
        """Return a sample, or a stacked batch, with other images."""
        if not self.strong:
            return sample
        first = sample[0] if isinstance(sample, tuple | list) and sample else None
        if not isinstance(first, Tensor):
            got = type(sample).__name__ + (f" that begins with a {type(first).__name__}" if first is not None else "")
            raise UserError(
                f"{type(self.dataset).__name__} has samples that are not (image, ...): a {got}",
                key="data.train",
                remedy="Let the data set return a tuple whose first entry is a floating tensor [C, H, W].",
            )
        images = first if stacked else first[None]
        if images.ndim != 4 or not images.is_floating_point():
            shape = "[N, C, H, W]" if stacked else "[C, H, W]"
            raise UserError(
                f"{type(self.dataset).__name__} has samples {[*first.shape]} of {first.dtype}, not images {shape}",
                key="data.train",
                remedy="Only floating-point images can be augmented; convert them in the data set.",
            )
        distorted = self._images(images)
        return (distorted if stacked else distorted[0], *sample[1:])

    def _images(self, images: Tensor) -> Tensor:
        """Distort images `[N, C, H, W]`, each differently."""
        drawn = torch.rand(5, len(images)) * 2 - 1
        moved = _moved(images, drawn[:2] * self.shift * self.strength, drawn[2] * self.angle * self.strength)
        side = round(self.cutout * self.strength)
        return _covered(moved, (drawn[3:] + 1) / 2, side) if side else moved


def _moved(images: Tensor, shift: Tensor, angle: Tensor) -> Tensor:
    """Move each image by `shift` `[2, N]` (x and y, in pixels) and turn it by `angle` `[N]` (in degrees).

    Pixels from outside the image have the color of the nearest edge.
    """
    _, _, height, width = images.shape
    turn = angle * (math.pi / 180)
    cos, sin = turn.cos(), turn.sin()
    # Maps positions in the new image to the old one, in units of half the size.
    rows = [cos, -sin * height / width, -shift[0] * 2 / width, sin * width / height, cos, -shift[1] * 2 / height]
    grid = affine_grid(torch.stack(rows, dim=1).view(-1, 2, 3), list(images.shape), align_corners=False)
    return grid_sample(images, grid.to(images.dtype), mode="bilinear", padding_mode="border", align_corners=False)


def _covered(images: Tensor, middle: Tensor, side: int) -> Tensor:
    """Set a square around `middle` `[2, N]` (x and y, 0..1 of the size) of each image to 0."""
    _, _, height, width = images.shape
    inside = [
        (torch.arange(size) - (place[:, None] * size - side / 2).round())
        for place, size in zip(middle, (width, height), strict=True)
    ]
    across, down = [(distance >= 0) & (distance < side) for distance in inside]
    return images.masked_fill(down[:, None, :, None] & across[:, None, None, :], 0.0)
