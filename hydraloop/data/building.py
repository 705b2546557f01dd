"""From the config to the loaders of a run."""

from __future__ import annotations

from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf

from hydraloop.data.loader import build_loader
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Loaders
from hydraloop.safety.instantiate import instantiate


def build_loaders(cfg: DictConfig, device: torch.device, distributed: Distributed) -> Loaders:
    """Return a loader for each of `data.train`, `data.val` and `data.test` that is not null.

    Evaluation uses `data.loader.eval_batch_size`, keeps the order of the data and drops no batch.

    Args:
        cfg: the whole config, validated.
        device: where batches are copied to.
        distributed: the ranks that share the samples.

    Raises:
        UserError: a data set or an option of the loader; names its key.
    """
    options = cast(dict[str, Any], OmegaConf.to_container(cfg.data.loader, resolve=True))
    eval_batch_size = options.pop("eval_batch_size", None) or options["batch_size"]
    loaders: dict[str, Any] = {}
    for split in ("train", "val", "test"):
        if cfg.data.get(split) is None:
            continue
        trains = split == "train"
        changed = {} if trains else {"batch_size": eval_batch_size, "drop_last": False}
        loaders[split] = build_loader(
            instantiate(cfg.data[split], f"data.{split}"),
            shuffle=trains,
            seed=cfg.seed,
            device=device,
            key=f"data.{split}",
            rank=distributed.rank,
            world_size=distributed.world_size,
            **{**options, **changed},
        )
    return Loaders(**loaders)
