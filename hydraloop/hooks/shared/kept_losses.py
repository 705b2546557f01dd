"""Losses that a hook keeps on their device until it looks at several of them with one host sync."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.loaders import Ordered


@dataclass(slots=True)
class KeptLoss:
    """The loss of an iteration: one value of any shape, on its device."""

    iteration: int
    """From 1."""
    epoch: int
    """From 0."""
    batch_idx: int
    """In the epoch, from 0."""
    loss: Tensor
    step: str = ""
    """Of the task, if it has steps."""
    weight: float | Tensor = 1.0
    """This rank's share in the mean over the ranks, as in `Engine.loss_weights`."""


def loss_in_backward(engine: Engine, batch_idx: int, outputs: Mapping[str, Any]) -> KeptLoss:
    """Return the loss in `after_backward`; of a filler batch, whose loss may be NaN, it is 0. No host sync."""
    loss, weight = outputs["loss"], engine.stepper.loss_weights[f"{engine.stepper.step}/loss".lstrip("/")]
    if not engine.stepper.batch_samples:
        loss = torch.zeros_like(loss)
    if isinstance(weight, Tensor):
        weight = weight.clone()  # the task may reuse its storage
    iteration = engine.progress.iteration + 1  # the counters move after the step
    return KeptLoss(iteration, engine.progress.epoch, batch_idx, loss, engine.stepper.step, weight)


def means_of(kept: Sequence[KeptLoss], ranks: Distributed) -> list[float]:
    """Return the mean of each loss over the ranks, by weight. One host sync; with several ranks, one exchange between
    the hosts."""
    losses = torch.stack([one.loss.reshape(()).double() for one in kept])
    means: list[float]
    if ranks.world_size == 1:
        means = losses.tolist()
        return means
    ones = torch.ones_like(losses[0])
    on_device = [one.weight.reshape(()).to(ones) if isinstance(one.weight, Tensor) else ones for one in kept]
    losses, weights = torch.stack((losses, torch.stack(on_device))).cpu()
    weights *= torch.tensor([1.0 if isinstance(one.weight, Tensor) else one.weight for one in kept])
    totals, weights = ranks.sum(torch.stack((losses * weights, weights)))
    means = (totals / weights.clamp(min=1)).tolist()
    return means


def samples_of(engine: Engine, epoch: int, batch_idx: int) -> list[int] | None:
    """Return the indices of this rank's samples in `data.train`; None if the loader does not know them.

    Args:
        epoch: of the batch, from 0.
        batch_idx: in the epoch, from 0.
    """
    loader: object = engine.loaders.train
    if not isinstance(loader, Ordered):
        return None
    # With `default_hooks.sampler_seed=null`, the loader's epoch is not set.
    follows = loader.epoch == engine.progress.epoch
    return loader.indices_at(batch_idx, epoch if follows else loader.epoch)
