"""A data set in memory that returns whole batches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset


class InMemoryDataset(Dataset[tuple[Tensor, Tensor]]):
    """Inputs and targets as two tensors.

    A DataLoader calls `__getitems__` once for a batch, so a batch takes two index operations, instead of one for each
    sample and a collation.

    Args:
        inputs: `[N, ...]`.
        targets: `[N]` (class indices) or `[N, ...]`.
        classes: names of the classes, in the order of their indices; None: they have no names.

    Raises:
        ValueError: inputs and targets differ in length.
    """

    def __init__(self, inputs: Tensor, targets: Tensor, classes: Sequence[str] | None = None) -> None:
        if len(inputs) != len(targets):
            raise ValueError(f"{len(inputs)} inputs, but {len(targets)} targets")
        self.inputs = inputs
        self.targets = targets
        self.classes = None if classes is None else tuple(classes)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Return one sample: the input `[...]` and its target."""
        return self.inputs[index], self.targets[index]

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        """Return one stacked batch: the inputs `[B, ...]` and the targets `[B, ...]` (copies, not views)."""
        chosen = torch.tensor(indices, dtype=torch.int64)
        return self.inputs[chosen], self.targets[chosen]
