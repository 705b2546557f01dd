"""Augmented: how images are distorted, and when they are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from examples.contrastive.augmented import Augmented
from hydraloop.data import InMemoryDataset, build_loader
from hydraloop.errors import UserError
from hydraloop.examples import Digits


def images(count: int = 4, side: int = 8) -> Tensor:
    """N times the same image: a bright dot in a dark field, not in the middle."""
    made = torch.zeros(count, 1, side, side)
    made[:, :, 2, 5] = 1.0
    return made


def stacked(count: int = 4) -> InMemoryDataset:
    return InMemoryDataset(images(count), torch.arange(count), classes=["a", "b"])


class OneByOne(Dataset[Any]):
    """Samples of three parts, without `__getitems__`."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[Tensor, int, str]:
        return images(1)[0], index, f"name {index}"


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_a_shift_moves_the_image_by_at_most_this_many_pixels() -> None:
    batch, _ = Augmented(stacked(200), shift=2, angle=0, cutout=0).__getitems__(list(range(200)))
    mass = batch / batch.sum((2, 3), keepdim=True)
    rows = (mass.sum(3) * torch.arange(8)).sum(2)
    columns = (mass.sum(2) * torch.arange(8)).sum(2)
    for place, own in ((rows, 2), (columns, 5)):
        moved = place - own
        assert moved.abs().max() <= 2.0001
        assert moved.min() < -1.5
        assert moved.max() > 1.5


@pytest.mark.parametrize(("shape", "turned"), [((8, 8), {(2, 2), (5, 5)}), ((5, 9), {(3, 4), (1, 4)})])
def test_an_angle_turns_it_around_its_middle_with_square_pixels(
    shape: tuple[int, int], turned: set[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = torch.zeros(1, 1, *shape)
    image[0, 0, 2, 5] = 1.0
    monkeypatch.setattr(torch, "rand", lambda *size: torch.ones(size))  # the largest angle
    result = Augmented(InMemoryDataset(image, torch.zeros(1)), shift=0, angle=90, cutout=0)[0][0][0]
    assert divmod(int(result.argmax()), shape[1]) in turned
    assert result.max() > 0.99


def test_a_cutout_covers_a_square_of_this_size_anywhere() -> None:
    bright = InMemoryDataset(torch.ones(300, 2, 8, 6), torch.zeros(300))
    batch, _ = Augmented(bright, shift=0, angle=0, cutout=3).__getitems__(list(range(300)))
    covered = batch == 0
    assert torch.equal(covered[:, 0], covered[:, 1]), "all channels alike"
    areas = covered[:, 0].sum((1, 2))
    assert areas.max() == 9
    assert areas.min() >= 2, "a part of it may be outside"
    assert covered[:, 0].any(0).all(), "anywhere"
    assert bool((batch[~covered] == 1).all())


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


@pytest.mark.parametrize("wrap", [lambda inside: inside, lambda inside: Subset(inside, [3, 2, 1, 0])])
def test_single_samples_and_stacked_batches(wrap: Any) -> None:
    data = Augmented(wrap(OneByOne()))
    image, index, name = data[1]
    assert (image.shape, name) == ((1, 8, 8), f"name {index}")
    batch = next(iter(build_loader(data, shuffle=False, batch_size=4)))
    assert batch[0].shape == (4, 1, 8, 8)
    assert sorted(batch[2]) == ["name 0", "name 1", "name 2", "name 3"]
    assert len({image.numpy().tobytes() for image in batch[0]}) == 4
    assert len(data) == 4


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


def test_it_has_the_classes_of_the_other_data_set() -> None:
    assert Augmented(stacked()).classes == ("a", "b")
    assert Augmented(OneByOne()).classes is None
    assert len(Augmented(Digits("train"))) == 1259


@pytest.mark.parametrize("option", ["shift", "angle", "cutout", "ramp_epochs"])
def test_a_negative_number_is_refused(option: str) -> None:
    with pytest.raises(UserError) as caught:
        Augmented(stacked(), **{option: -1})
    assert caught.value.key == option


@pytest.mark.parametrize(
    ("inputs", "got"),
    [(torch.zeros(4, 3), r"\[4, 3\] of torch.float32"), (torch.zeros(4, 1, 8, 8).byte(), "of torch.uint8")],
)
def test_samples_that_are_not_images_are_refused(inputs: Tensor, got: str) -> None:
    with pytest.raises(UserError, match=rf"^data.train: InMemoryDataset has samples .*{got}"):
        Augmented(InMemoryDataset(inputs, torch.zeros(4))).__getitems__([0, 1, 2, 3])
