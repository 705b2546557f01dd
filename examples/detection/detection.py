"""Detection of rectangles by a model that is called as the detectors of torchvision."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, max_pool2d
from torch.utils.data import Dataset

from hydraloop import Task

SIZE, CELL = 32, 4
"""Pixels of an image and of a cell, in each direction."""
CELLS = SIZE // CELL
Boxes = dict[str, Tensor]
"""`boxes` `[K, 4]` (left, top, right, bottom), `labels` `[K]` from 1 on, and `scores` `[K]` of those that are found."""


class Rectangles(Dataset):
    """Images `[1, 32, 32]` with 0 to 3 rectangles in noise: full ones are of class 1, hollow ones of class 2."""

    def __init__(self, images: int, seed: int) -> None:
        self.images, self.seed = images, seed

    def __len__(self) -> int:
        return self.images

    def __getitem__(self, index: int) -> tuple[Tensor, Boxes]:
        draw = torch.Generator().manual_seed(self.seed * 1_000_000 + index)
        image = torch.randn(1, SIZE, SIZE, generator=draw) / 4
        quarters = torch.randperm(4, generator=draw)[: int(torch.randint(4, (), generator=draw))]
        labels = torch.randint(1, 3, quarters.shape, generator=draw)
        sizes = torch.randint(6, 13, (len(labels), 2), generator=draw)
        offsets = torch.rand(len(labels), 2, generator=draw) * (SIZE // 2 - sizes)
        corners = torch.stack([quarters % 2, quarters // 2], 1) * (SIZE // 2) + offsets.long()
        for (x, y), (width, height), label in zip(corners.tolist(), sizes.tolist(), labels.tolist(), strict=True):
            image[:, y : y + height, x : x + width] += 1
            if label == 2:
                image[:, y + 2 : y + height - 2, x + 2 : x + width - 2] -= 1
        return image, {"boxes": torch.cat([corners, corners + sizes], 1).float(), "labels": labels}


def lists(samples: list[tuple[Tensor, Boxes]]) -> tuple[Any, ...]:
    """Return the images and the targets of a batch, each as a tuple."""
    return tuple(zip(*samples, strict=True))


class Detector(nn.Module):
    """Finds in each cell the box whose center is there. The losses are means over the images."""

    def __init__(self, num_classes: int, width: int = 32) -> None:
        super().__init__()
        sizes = ((1, width, 3, 2, 1), *[(width, width, 3, stride, 1) for stride in (2, 1, 1)])
        layers = [layer for size in sizes for layer in (nn.Conv2d(*size), nn.GroupNorm(4, width), nn.ReLU())]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, num_classes + 4, 1))
        self.layers[-1].bias.data[:num_classes] = -3.0  # most cells have no box

    def forward(self, images: list[Tensor], targets: list[Boxes] | None = None) -> Any:
        """Return a dict of losses in train mode, and the boxes of each image in eval mode."""
        maps = self.layers(torch.stack([*images])).flatten(2).mT.float()  # [N, cells, classes + 4]
        logits, sides = maps[..., :-4], maps[..., -4:].exp() * CELL
        middles = torch.arange(CELL / 2, SIZE, CELL, device=maps.device)
        centers = torch.cartesian_prod(middles, middles).flip(1)
        boxes = torch.cat([centers - sides[..., :2], centers + sides[..., 2:]], -1)
        if self.training:
            return self.losses(logits, boxes, targets or [])
        scores, labels = logits.sigmoid().max(-1)
        highest = max_pool2d(scores.view(-1, CELLS, CELLS), 3, 1, 1).flatten(1)
        keep = (scores == highest) & (scores > 0.05)  # of cells side by side, the one with the highest score
        found = zip(boxes, scores, labels + 1, keep, strict=True)
        return [{"boxes": box[k], "scores": score[k], "labels": label[k]} for box, score, label, k in found]

    def losses(self, logits: Tensor, boxes: Tensor, targets: list[Boxes]) -> dict[str, Tensor]:
        wanted, distance = torch.zeros_like(logits), logits.new_zeros(())
        for image, target in enumerate(targets):
            x, y = (target["boxes"].view(-1, 2, 2).mean(1) // CELL).long().unbind(1)
            wanted[image, y * CELLS + x, target["labels"] - 1] = 1
            distance = distance + (boxes[image, y * CELLS + x] - target["boxes"]).abs().sum() / CELL
        classifier = binary_cross_entropy_with_logits(logits, wanted, reduction="sum")
        return {"loss_classifier": classifier / len(targets), "loss_box_reg": distance / len(targets)}


class Detection(Task):
    """The loss is the sum of those that the model returns."""

    def forward(self, batch: Any) -> dict[str, Any]:
        images, targets = batch
        found = self.model(images, targets)
        if self.training:
            return {"loss": sum(found.values()), **found}
        return {"outputs": found, "targets": targets}
