"""Augmented: how images are distorted, and when they are not."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from examples.contrastive.augmented import Augmented
from hydraloop.data import InMemoryDataset


def images(count: int = 4, side: int = 8) -> Tensor:
    """N times the same image: a bright dot in a dark field, not in the middle."""
    made = torch.zeros(count, 1, side, side)
    made[:, :, 2, 5] = 1.0
    return made


def stacked(count: int = 4) -> InMemoryDataset:
    return InMemoryDataset(images(count), torch.arange(count), classes=["a", "b"])


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_each_image_is_distorted_differently_each_time() -> None:
    data = Augmented(stacked(8))
    first, second = (data.__getitems__(list(range(8)))[0] for _ in range(2))
    assert len({image.numpy().tobytes() for image in (*first, *second)}) == 16
    assert first.shape == (8, 1, 8, 8)
    assert torch.equal(stacked(8).inputs, images(8)), "the data set itself stays as it is"


def test_switched_off_images_are_unchanged_and_switched_on_distorted() -> None:
    data = Augmented(stacked())
    data.set_strong_augmentation(False)
    assert torch.equal(data.__getitems__([0, 1])[0], images(2))
    assert torch.equal(data[0][0], images(1)[0])
    data.set_strong_augmentation(True)
    assert not torch.equal(data.__getitems__([0, 1])[0], images(2))
    assert not torch.equal(data[0][0], images(1)[0])


def test_the_strength_grows_with_the_epochs() -> None:
    data = Augmented(stacked(), ramp_epochs=4)
    assert data.strength == 0.25, "before the first epoch"
    strengths = []
    for epoch in range(6):
        data.set_epoch(epoch)
        strengths.append(data.strength)
    assert strengths == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    plain = Augmented(stacked())
    plain.set_epoch(0)
    assert plain.strength == 1.0
