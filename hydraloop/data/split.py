"""A split into train, val and test that keeps the share of each class."""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from hydraloop.errors import UserError

Split = Literal["train", "val", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)


def stratified_split(labels: Tensor, split: str, *, val: float = 0.1, test: float = 0.2, seed: int = 0) -> Tensor:
    """Return the indices of one part, sorted.

    The samples of each class are shuffled by `seed`. The first belong to the test part, the next to the val part, the
    rest to the train part. Each part has the same share of each class, rounded.

    Args:
        labels: `[N]`, the class (or bin) of each sample.
        split: which part: `train`, `val` or `test`.
        val: the share of the val part, 0..1.
        test: the share of the test part, 0..1; `val + test` below 1.
        seed: of the order; the global random state is not used.

    Raises:
        UserError: the split is unknown.
    """
    if split not in SPLITS:
        raise UserError(f"cannot be {split!r}", key="split", remedy=f"Use {', '.join(SPLITS)}.")
    generator = torch.Generator().manual_seed(seed)
    parts: list[Tensor] = []
    for label in torch.unique(labels):
        members = (labels == label).nonzero().flatten()
        members = members[torch.randperm(len(members), generator=generator)]
        last_test = round(test * len(members))
        last_val = last_test + round(val * len(members))
        parts.append(
            {"test": members[:last_test], "val": members[last_test:last_val], "train": members[last_val:]}[split]
        )
    return torch.cat(parts).sort().values
