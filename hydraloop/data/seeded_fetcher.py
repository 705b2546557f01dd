"""Loads the batch of a request, with draws that depend only on the seed, the epoch and the sample."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from hydraloop.data.collate import Collate
from hydraloop.data.in_memory import InMemoryDataset
from hydraloop.data.random_state import SampleGenerators, mix_seed
from hydraloop.data.sampler import BatchRequest
from hydraloop.engine.loaders import data_sets_with

_SAMPLE, _BATCH, _COLLATE = 5, 6, 7  # separate these seeds from others of the run
_AHEAD = 64  # batches whose seeds are computed at once: 1 µs a batch instead of 20
_WITHOUT_DRAWS = (TensorDataset, InMemoryDataset, list, tuple, range)


class SeededFetcher:
    """A data set as torch's DataLoader sees it: its samples are the batches of requests.

    Before each sample, the global generators from which samples draw (torch's on the CPU, NumPy's and Python's) are
    seeded by (seed, epoch, index); see `SampleGenerators`. So the draws of `__getitem__` do not depend on the workers,
    on what they load ahead, or on where a run began. For a data set with `__getitems__` and for a custom `collate_fn`,
    the generators are seeded once for each batch. In the training process, the generators have their states back after
    each batch.

    `set_epoch(epoch)` of the data set, and of those it wraps, is called in the process that loads, before the first
    batch of an epoch.

    Args:
        dataset: with `__getitem__`, and `__getitems__` if it has it.
        collate: makes a batch of a list of samples.
        seed: of the run.
        repeats: whether an epoch may have a sample several times. Its draws then differ by the position in the epoch.
    """

    def __init__(self, dataset: Any, collate: Collate, seed: int, *, repeats: bool) -> None:
        self.dataset, self.collate = dataset, collate
        self.by_batch = _by_batch(dataset)
        self.may_draw, self._seed, self._repeats = _may_draw(dataset), seed, repeats
        self._generators = SampleGenerators()
        self._epoch: int | None = None

    def __getitems__(self, request: BatchRequest) -> Any:
        """Return the batch of a request."""
        may_draw = self.may_draw or self.collate.given
        if not may_draw and request.epoch == self._epoch:
            return self.collate(self._samples(request, None), request.indices)
        return self._generators.loaded(lambda seed: self._batch(request, seed), exact=not may_draw)

    def samples(self, request: BatchRequest) -> Any:
        """Return the samples of a request, or what the data set has stacked of them."""
        return self._generators.loaded(lambda seed: self._samples(request, seed))

    def with_seeds(self, requests: Iterator[BatchRequest]) -> Iterator[BatchRequest]:
        """Yield the requests of an epoch with the seeds of their samples, computed for several batches at once."""
        while ahead := list(islice(requests, _AHEAD)):
            seeds = iter(self._seeds(ahead))
            for indices, epoch, number, _ in ahead:
                yield BatchRequest(indices, epoch, number, list(islice(seeds, len(indices))))

    def _seeds(self, requests: list[BatchRequest]) -> list[int]:
        """Return the seeds of all samples of the requests, which are of one epoch."""
        parts = [[index for request in requests for index in request.indices]]
        if self._repeats:
            parts.append([request.number + at for request in requests for at in range(len(request.indices))])
        arrays: Any = [np.array(part, dtype=np.uint64) for part in parts]
        seeds: Any = mix_seed(self._seed, requests[0].epoch or 0, _SAMPLE, *arrays)
        of_samples: list[int] = seeds.tolist()
        return of_samples

    def _batch(self, request: BatchRequest, seed: Callable[[int], object]) -> Any:
        samples = self._samples(request, seed)
        if self.collate.given:
            seed(mix_seed(self._seed, request.epoch or 0, _COLLATE, request.number))
        return self.collate(samples, request.indices)

    def _samples(self, request: BatchRequest, seed: Callable[[int], object] | None) -> Any:
        """Return the samples; each is loaded after `seed` was called, unless that is None."""
        try:
            return self._loaded(request, seed)
        except Exception as error:
            error.add_note(f"{self.collate.data}: samples {request.indices}, in epoch {(request.epoch or 0) + 1}")
            raise

    def _loaded(self, request: BatchRequest, seed: Callable[[int], object] | None) -> Any:
        indices, epoch, number, seeds = request
        if epoch != self._epoch:
            self._set_epoch(epoch)
        dataset = self.dataset
        if self.by_batch:
            if seed is not None:
                seed(mix_seed(self._seed, epoch or 0, _BATCH, number))
            return dataset.__getitems__(indices)
        if seed is None or not self.may_draw:
            return [dataset[index] for index in indices]
        samples = []
        for index, of_sample in zip(indices, seeds or self._seeds([request]), strict=True):
            seed(of_sample)
            samples.append(dataset[index])
        return samples

    def _set_epoch(self, epoch: int | None) -> None:
        self._epoch = epoch
        for data in data_sets_with("set_epoch", self):
            data.set_epoch(epoch)


def _by_batch(dataset: Any) -> bool:
    """Return whether `__getitems__` has an effect on the draws. That of torch's Subset calls that of its data set."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return getattr(dataset, "__getitems__", None) is not None


def _may_draw(dataset: Any) -> bool:
    """Return whether the samples of a data set may draw random numbers."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is ConcatDataset:
        return any(_may_draw(each) for each in dataset.datasets)
    return type(dataset) not in _WITHOUT_DRAWS
