"""From the config to the loaders of a run."""

from __future__ import annotations

from collections.abc import Iterable, Sized
from typing import Any

import torch
from omegaconf import DictConfig
from torch.utils.data import DataLoader, IterableDataset

from hydraloop.data.loader import build_loader
from hydraloop.data.loader_options import options_of
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Loaders
from hydraloop.errors import UserError
from hydraloop.safety.instantiate import instantiate
from hydraloop.schemas.data import SPLITS

_OF_STREAMS = ("steps_per_epoch", "skip_on_resume")


def build_loaders(cfg: DictConfig, device: torch.device, distributed: Distributed) -> Loaders:
    """Return a loader for each of `data.train`, `data.val` and `data.test` that is not null.

    Only the train loader shuffles. Each has the options of `data.loader` and of its own section; see `LoaderConf`.

    Args:
        cfg: the whole config, validated.
        device: where batches are copied to.
        distributed: the ranks that share the samples.

    Raises:
        UserError: a data set or an option of the loader; names its key.
    """
    loaders: dict[str, Any] = {}
    for split in SPLITS:
        if cfg.data.get(split) is None:
            continue
        key = f"data.{split}"
        data = instantiate(cfg.data[split], key)
        if _yields_batches(data, key):
            loaders[split] = data
            continue
        options, keys = options_of(cfg.data, split)
        if options["steps_per_epoch"] is not None:
            raise UserError(
                f"{key} has indices, so an epoch has all its samples",
                key=keys["steps_per_epoch"],
                remedy="Leave it out.",
            )
        loaders[split] = build_loader(
            data,
            shuffle=split == "train",
            seed=cfg.seed,
            device=device,
            key=key,
            keys=keys,
            rank=distributed.rank,
            world_size=distributed.world_size,
            **{name: value for name, value in options.items() if name not in _OF_STREAMS},
        )
    return Loaders(**loaders)


def _yields_batches(data: Any, key: str) -> bool:
    """Return whether `data` is a loader: a DataLoader, or an iterable with a length and without indices.

    Raises:
        UserError: it is neither a loader nor a data set.
    """
    if isinstance(data, DataLoader):
        return True
    if isinstance(data, IterableDataset) or hasattr(data, "__getitem__"):
        if not isinstance(data, IterableDataset | Sized):
            raise UserError(f"{type(data).__name__} has no length", key=key, remedy="Give it a method __len__.")
        return False
    if isinstance(data, Iterable) and isinstance(data, Sized):
        return True
    raise UserError(
        f"{type(data).__name__} is neither a data set nor a loader",
        key=key,
        remedy="Use an object with __getitem__ and __len__ (samples), or with __iter__ and __len__ (batches).",
    )
