"""Refuses loaders with which a run cannot train."""

from __future__ import annotations

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.ready_loader import check_ranks
from hydraloop.errors import UserError


def check_trainable(loaders: Loaders, ranks: Distributed) -> None:
    """Refuse to train without a train loader, or with one that has no batch."""
    if loaders.train is None:
        raise UserError(
            "there is no training data", key="data.train", remedy="Try data=digits, or in Python loaders={'train': …}."
        )
    check_ranks(loaders.train, ranks.world_size)
    if not all(check_lengths(loaders, ranks)):
        raise UserError(
            "the train loader has no batch",
            key="data.loader.batch_size",
            remedy="Use a batch size up to the size of the data set, or data.loader.drop_last=false.",
        )


def check_lengths(loaders: Loaders, ranks: Distributed) -> list[int]:
    """Refuse loaders of different lengths, with which some ranks would wait forever for others.

    In evaluation, ranks wait for each other only if the model is sharded.

    Returns:
        The number of train batches on each rank.
    """
    mine = {"train": 0, **{key: len(loader) for key, loader in loaders.by_key().items()}}
    gathered: list[dict[str, int]] = ranks.gather(mine)
    for split in mine if ranks.sharded else ("train",):
        lengths = [one.get(split, 0) for one in gathered]
        if len(set(lengths)) > 1:
            raise UserError(
                f"the ranks have different numbers of batches in an epoch: {', '.join(map(str, lengths))}; those with "
                "more would wait for the others forever",
                key=f"data.{split.replace('/', '.')}",
                remedy="Give each rank the same number of batches, as hydraloop's loader does.",
            )
    return [one["train"] for one in gathered]
