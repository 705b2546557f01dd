"""Losses that a hook keeps on their device until it looks at several of them with one host sync."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from hydraloop.engine.engine import Engine
from hydraloop.engine.loaders import Ordered


@dataclass(slots=True)
class Seen:
    """The loss of an iteration: one value of any shape, on its device."""

    iteration: int
    """From 1."""
    epoch: int
    """From 0."""
    batch_idx: int
    """In the epoch, from 0."""
    loss: Tensor
    step: str
    """Of the task, if it has steps."""


def samples_of(engine: Engine, seen: Seen) -> list[int] | None:
    """Return the indices of this rank's samples in `data.train`; None if the loader does not know them."""
    loader: object = engine.loaders.train
    if not isinstance(loader, Ordered):
        return None
    # With `default_hooks.sampler_seed=null`, the loader's epoch is not set.
    follows = loader.epoch == engine.progress.epoch
    return loader.indices_at(seen.batch_idx, seen.epoch if follows else loader.epoch)
