"""The kinds of streams: how each is split between the workers of all ranks, their lengths, Hugging Face's classes."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

from torch.utils.data import IterableDataset

from hydraloop.errors import UserError


class Source(NamedTuple):
    """A set, and how its samples are split between the copies of it, of which each worker of each rank has one."""

    dataset: Any
    split: Literal["own", "method", "samples"]
    """`own`: by the set itself; `method`: by `dataset.split(index, count)`; `samples`: each copy keeps every n-th."""


def split(
    dataset: Any, split_stream: bool | None, rank: int, world_size: int, workers: int, key: str, option: str
) -> Source:
    """Return the set with the way in which it is split between the workers of all ranks.

    A Hugging Face set splits itself. A method `split(index, count)` is asked for the part of each worker. Any other
    set of a plain class is read whole by each worker, which keeps every n-th sample. A torch IterableDataset may split
    itself between workers (torch asks for it) or not, so the user must say it, in `option`.
    """
    if world_size * workers == 1 or split_stream is False:
        return Source(dataset, "own")
    if is_hugging_face(dataset):
        if world_size > 1:
            theirs = importlib.import_module("datasets.distributed")  # installed, because the set is of its class
            dataset = theirs.split_dataset_by_node(dataset, rank, world_size)
        return Source(dataset, "own")
    if callable(getattr(dataset, "split", None)):
        return Source(dataset, "method")
    if split_stream is None and isinstance(dataset, IterableDataset):
        raise UserError(
            f"{type(dataset).__name__} does not say how {world_size * workers} workers (of all ranks) share it",
            key=key,
            remedy="Give it a method split(index, count) that returns a part of it. Or set "
            f"{option}=true to let each worker keep every n-th sample, or =false if it splits itself between ranks and "
            "workers.",
        )
    return Source(dataset, "samples")


def steps_of(dataset: Any, options: Mapping[str, Any], global_batch: int, key: str) -> int:
    """Return the batches of each rank in an epoch; an estimate if they follow from the length of the set."""
    steps: int | None = options["steps_per_epoch"]
    if steps is not None:
        return steps
    try:
        length = len(dataset)
    except TypeError:
        loader = "data.loader" if key.startswith("data.train") else f"{'.'.join(key.split('.')[:2])}_loader"
        raise UserError(
            f"{type(dataset).__name__} has no length, so the length of an epoch is unknown",
            key=key,
            remedy=f"Set {loader}.steps_per_epoch=1000, the number of batches of each rank in an epoch.",
        ) from None
    return length // global_batch if options["drop_last"] else -(-length // global_batch)


def is_hugging_face(dataset: object) -> bool:
    """Return whether it is an `IterableDataset` of Hugging Face's package datasets, which is not imported for this."""
    datasets: Any = sys.modules.get("datasets")
    return datasets is not None and isinstance(dataset, datasets.IterableDataset)


def has_shuffle_buffer(dataset: object) -> bool:
    """Return whether it is a Hugging Face set with a shuffle buffer, whose samples are not in its state.

    Searches what the set wraps; lists and tuples are of such parts.
    """
    if isinstance(dataset, list | tuple):
        return any(map(has_shuffle_buffer, dataset))
    theirs = type(dataset).__module__.startswith("datasets.")
    return theirs and ("BufferShuffled" in type(dataset).__name__ or has_shuffle_buffer([*vars(dataset).values()]))
