"""The first batches of a validation or test, made without its sampler and workers."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from hydraloop.engine.loaders import Ordered


def first_batches(loader: Any, count: int) -> list[Any]:
    """Return up to `count` batches that a loader of a validation or test would make, without starting workers.

    A loader with indices gives the first samples of its data set, so that no sampler is used. If the loader has
    workers, the samples are those of a copy: a data set may open files at its first sample, in each worker for itself.

    Returns:
        An empty list if the loader can be iterated only once, or its data set cannot be copied.
    """
    if isinstance(loader, DataLoader | Ordered):
        return [_collated(loader, samples, number) for number, samples in enumerate(islice(_samples(loader), count))]
    if hasattr(loader, "first_batches"):  # of a stream
        batches: list[Any] = loader.first_batches(count)
        return batches
    found = iter(loader)
    return [] if found is loader else list(islice(found, count))


def _collated(loader: Any, samples: Any, number: int) -> Any:
    try:
        return loader.collate_fn(samples)
    except Exception as error:
        explain = getattr(loader, "misfit", None)  # of hydraloop's loader
        mistake = None if explain is None else explain(samples, number)
        if mistake is None:
            raise
        raise mistake from error


def _samples(loader: Any) -> Iterator[Any]:
    """Yield what the collate function of a loader gets for each batch."""
    dataset: Any = loader.dataset
    if loader.num_workers:
        try:
            dataset = _copy_of(dataset)
        except Exception:  # of a class of the user
            return
    if isinstance(loader, DataLoader) and loader.batch_sampler is None:  # the data set yields batches
        yield from _items(dataset, loader)
        return
    # A sampler of batches may not know its batch size. Then 2, because some models fail with a batch of 1.
    size = loader.batch_size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or 2
    fetch = getattr(dataset, "__getitems__", None)
    if fetch is not None:
        for first in range(0, len(dataset), size):
            yield fetch(list(range(first, min(first + size, len(dataset)))))
        return
    items = _items(dataset, loader)
    while batch := list(islice(items, size)):
        yield batch


def _items(dataset: Any, loader: Any) -> Iterator[Any]:
    if isinstance(dataset, IterableDataset):
        yield from dataset
        return
    for index in range(len(dataset)):
        try:
            item = dataset[index]
        except Exception as error:
            error.add_note(f"{getattr(loader, 'key', 'data')}: sample {index}")
            raise
        yield item


def _copy_of(data: Any) -> Any:
    """Return a shallow copy of a data set and of those that it wraps."""
    copied = copy.copy(data)
    attributes = getattr(copied, "__dict__", {})
    if "dataset" in attributes:
        attributes["dataset"] = _copy_of(data.dataset)
    if isinstance(attributes.get("datasets"), list | tuple):
        attributes["datasets"] = [_copy_of(each) for each in data.datasets]
    return copied
