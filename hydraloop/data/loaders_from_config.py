"""From the config to the loaders of a run."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sized
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import torch
from omegaconf import DictConfig
from torch.utils.data import DataLoader, IterableDataset, Subset

from hydraloop.data.batching import options_from_config
from hydraloop.data.map_style_loader import GlobalBatchLoader, build_loader
from hydraloop.data.stream_loader import StreamLoader, TrainStreamLoader
from hydraloop.data.stream_worker import StreamPlace
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Loader, Loaders
from hydraloop.errors import UserError, any_of
from hydraloop.safety.instantiate import instantiate, require_target
from hydraloop.schemas.data import SPLITS

log = logging.getLogger(__name__)


def build_loaders(
    cfg: DictConfig,
    device: torch.device,
    distributed: Distributed,
    given: Loaders | Mapping[str, Any] | None = None,
) -> Loaders:
    """Return a loader for each of `data.train`, `data.val` and `data.test` that is not null.

    Only the train loader shuffles. Each has the options of `data.loader` and of its own section; see `LoaderConf`.

    Args:
        cfg: the whole config, validated.
        device: where batches are copied to.
        distributed: the ranks that share the samples.
        given: all loaders, or those of some splits (null: no loader), used instead of those of the config.

    Raises:
        UserError: a data set or an option of the loader; names its key.
    """
    if isinstance(given, Loaders):
        return given
    loaders: dict[str, Any] = dict(given or {})
    check_splits(loaders, "loaders")
    builder = _Builder(cfg, device, distributed)
    if cfg.engine.overfit_batches is not None and cfg.data.get("train") is not None and "train" not in loaders:
        return replace(builder.overfit(), **loaders)
    for split in SPLITS:
        node = cfg.data.get(split)
        if node is not None and split not in loaders:
            sets = _named(node, f"data.{split}") if split != "train" else {}
            loaders[split] = {
                name: builder.loader(split, each, f"data.{split}.{name}") for name, each in sets.items()
            } or builder.loader(split, node, f"data.{split}")
    return Loaders(**loaders)


def check_splits(splits: Iterable[str], key: str) -> None:
    """Refuse what is not the name of a split."""
    for split in splits:
        if split not in SPLITS:
            raise UserError(f"{split!r} is not a split", key=key, remedy=f"Use {any_of(SPLITS)}.")


@dataclass(frozen=True)
class _Builder:
    """Makes loaders; see `build_loaders`."""

    cfg: DictConfig
    device: torch.device
    distributed: Distributed

    def loader(self, split: str, node: Any, key: str) -> Loader:
        """Return the loader of the data set that `node` describes."""
        train = split == "train"
        data = instantiate(node, key)
        kind = _kind(data)
        if kind == "batches":
            return self._given(data, split, key)
        options, keys = options_from_config(self.cfg.data, split)
        if kind == "stream":
            if self.distributed.sharded and not train:
                raise UserError(
                    "ranks may get different numbers of batches of a stream, and FSDP needs the same number on each",
                    key=key,
                    remedy="Use data with indices, or distributed.strategy=ddp.",
                )
            of_split = TrainStreamLoader if train else StreamLoader
            return of_split(data, options, StreamPlace(self.distributed, self.cfg.seed, self.device, key, keys))
        if options["steps_per_epoch"] is not None:
            raise UserError(
                f"{key} has indices, so an epoch has all its samples",
                key=keys["steps_per_epoch"],
                remedy="Leave it out. engine.limit_train_batches limits an epoch.",
            )
        if split == "test":  # a single pass
            options["persistent_workers"] = False
        return self._of_samples(data, split, key, options, keys)

    def overfit(self) -> Loaders:
        """Return loaders of the first samples of the train data, for training and for each validation."""
        data, given = self.cfg.data, self.cfg.engine.overfit_batches
        whole = self.loader("train", data.train, "data.train")
        if not isinstance(whole, GlobalBatchLoader):
            raise UserError(
                "data.train has no indices, so its first samples cannot be trained on again and again",
                key="engine.overfit_batches",
                remedy="Use engine.limit_train_batches, or data with indices.",
            )
        batches = max(1, round(given * len(whole))) if isinstance(given, float) else given
        found = {split: options_from_config(data, split) for split in ("train", "val")}
        for options, _ in found.values():
            options |= {"sampler": None, "batch_sampler": None}
        options = found["train"][0]
        samples = batches * options["batch_size"] * self.distributed.world_size
        few = Subset(whole.dataset, range(min(samples, len(cast(Sized, whole.dataset)))))
        train, val = (self._of_samples(few, split, "data.train", *of_split) for split, of_split in found.items())
        if data.get("val") is None:
            return Loaders(train)
        return Loaders(train, dict.fromkeys(_named(data.val, "data.val"), val) or val)

    def _given(self, data: Any, split: str, key: str) -> Loader:
        """Return an object of the config that yields batches, which are not the same on all ranks."""
        if isinstance(data, DataLoader):  # the engine checks it
            return data
        name, world_size = type(data).__name__, self.distributed.world_size
        text = "has a length and no __getitem__, so it yields batches: the options of its loader have no effect"
        log.info("%s: %s %s", key, name, text)
        if split == "train" and world_size > 1 and not hasattr(data, "num_replicas"):
            raise UserError(
                f"{name} yields the same batches on each of {world_size} processes",
                key="data.train",
                remedy="Let data.train be the data set of its samples, or split the batches in the class and give it "
                "an attribute num_replicas.",
            )
        return cast(Loader, data)

    def _of_samples(
        self, data: Any, split: str, key: str, options: Mapping[str, Any], keys: Mapping[str, str]
    ) -> GlobalBatchLoader:
        return build_loader(
            data,
            shuffle=split == "train",
            seed=self.cfg.seed,
            device=self.device,
            key=key,
            keys=keys,
            rank=self.distributed.rank,
            world_size=self.distributed.world_size,
            **options,
        )


def _named(node: Any, key: str) -> dict[str, DictConfig]:
    """Return the data sets of a split by name, without those that are null; an empty dict if it is a single one.

    Raises:
        UserError: a set without a class, or a name that cannot be a part of a metric's name.
    """
    if not isinstance(node, DictConfig) or "_target_" in node:
        return {}
    sets = {str(name): each for name, each in node.items() if each is not None}
    if not all(isinstance(each, DictConfig) for each in sets.values()):
        return {}  # a class is missing, as its use shows
    for name, each in sets.items():
        require_target(each, f"{key}.{name}")
        if not re.fullmatch(r"[\w.@=+-]+", str(name)):
            raise UserError(
                f"{name!r} is not a name for a data set, because files and metrics are named after it",
                key=key,
                remedy="Use letters, digits, `_` and `-`.",
            )
    return sets


def _kind(data: Any) -> Literal["batches", "samples", "stream"]:
    """Return what `data` is: a loader, a set with indices, or a set that can only be iterated."""
    if isinstance(data, IterableDataset):
        return "stream"
    if isinstance(data, DataLoader):
        return "batches"
    if hasattr(data, "__getitem__"):
        return "samples"
    return "batches" if isinstance(data, Sized) else "stream"
