"""Contrastive learning: two views of an image have similar outputs, and those of all other images differ from them."""

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize
from torch.utils.data import Dataset

from hydraloop import Task


class Pairs(Dataset):
    """Two samples of each image of a data set that distorts images at random: `(view, other view, class)`."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor, Tensor]:
        view, classes = self.dataset.__getitems__(indices)
        return view, self.dataset.__getitems__(indices)[0], classes


class Contrastive(Task):
    """The loss of SimCLR, whose other images are those of the batches of all ranks."""

    temperature = 0.2

    def forward(self, batch: Any) -> dict[str, Tensor]:
        *views, classes = batch
        a, b = (normalize(self.model(view)) for view in views)
        ranks = self.engine.distributed
        if self.training and ranks.world_size > 1:  # batches of the same size: drop_last
            first, others = ranks.rank * len(a), [ranks.all_gather(a), ranks.all_gather(b)]
        else:
            first, others = 0, [a, b]
        own = torch.arange(first, first + len(a), device=a.device)
        losses = [cross_entropy(x @ y.T / self.temperature, own) for x, y in zip((b, a), others, strict=True)]
        if not self.training:  # how well the outputs tell classes that the training does not use
            nearest = (a @ a.T).fill_diagonal_(-1).argmax(1)
            self.log("nearest", (classes[nearest] == classes).float().mean())
        return {"loss": sum(losses) / 2}
