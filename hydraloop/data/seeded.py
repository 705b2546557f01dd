"""Loads the batch of a request, with draws that depend only on the seed, the epoch and the sample."""

from __future__ import annotations

from typing import Any

from torch.utils.data import ConcatDataset, Subset, TensorDataset

from hydraloop.data.collate import Collate
from hydraloop.data.order import private_generators, seed_generators
from hydraloop.data.sampler import Request, mix, mix_seed
from hydraloop.engine.loaders import data_sets_with

_SAMPLE, _BATCH, _COLLATE = 5, 6, 7  # separate these seeds from others of the run


class Seeded:
    """A data set as torch's DataLoader sees it: its samples are the batches of requests.

    Before each sample, torch's (on the CPU), NumPy's and Python's global generators are seeded by (seed, epoch, index).
    So the draws of `__getitem__` do not depend on the workers, on what they load ahead, or on where a run began. A data
    set with `__getitems__` is seeded once for each batch, and so is a custom `collate_fn`. In the training process,
    the generators have their states back after each batch.

    `set_epoch(epoch)` of the data set, and of those it wraps, is called in the process that loads, before the first
    batch of an epoch.

    A data set whose class has `draws = False` is not seeded, which saves about 10 µs per sample.

    Args:
        dataset: with `__getitem__`, and `__getitems__` if it has it.
        collate: makes a batch of a list of samples.
        seed: of the run.
        repeats: whether an epoch may have a sample several times. Its draws then differ by the position in the epoch.
    """

    def __init__(self, dataset: Any, collate: Collate, seed: int, *, repeats: bool) -> None:
        self.dataset, self.collate = dataset, collate
        self.by_batch = _by_batch(dataset)
        self.draws, self._seed, self._repeats = _draws(dataset), seed, repeats
        self._epoch: int | None = None
        self._told: list[Any] | None = None  # data sets with `set_epoch`

    def __getitems__(self, request: Request) -> Any:
        """Return the batch of a request."""
        draws = self.draws or self.collate.given
        if not draws and request.epoch == self._epoch:
            return self.collate(self._samples(request))
        with private_generators(exact=not draws):
            samples = self._samples(request)
            if self.collate.given:
                seed_generators(mix_seed(self._seed, request.epoch or 0, _COLLATE, request.number))
            return self.collate(samples)

    def samples(self, request: Request) -> Any:
        """Return the samples of a request, or what the data set has stacked of them."""
        with private_generators():
            return self._samples(request)

    def _samples(self, request: Request) -> Any:
        indices, epoch, number = request
        if epoch != self._epoch:
            self._set_epoch(epoch)
        dataset, draws = self.dataset, self.draws
        if self.by_batch:
            if draws:
                seed_generators(mix_seed(self._seed, epoch or 0, _BATCH, number))
            return dataset.__getitems__(indices)
        if not draws:
            return [dataset[index] for index in indices]
        samples, mixed = [], mix(0, self._seed, epoch or 0, _SAMPLE)
        for position, index in enumerate(indices, number):
            of_sample = mix(mixed, index, position) if self._repeats else mix(mixed, index)
            seed_generators(of_sample >> 32)
            samples.append(dataset[index])
        return samples

    def _set_epoch(self, epoch: int | None) -> None:
        self._epoch = epoch
        if self._told is None:
            self._told = data_sets_with("set_epoch", self)
        for data in self._told:
            data.set_epoch(epoch)


def as_is(batch: Any) -> Any:
    """Return what `Seeded` has made; at module level, so that workers can unpickle it."""
    return batch


def _by_batch(dataset: Any) -> bool:
    """Return whether `__getitems__` has an effect on the draws. That of torch's Subset calls that of its data set."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    return getattr(dataset, "__getitems__", None) is not None


def _draws(dataset: Any) -> bool:
    """Return whether the samples of a data set may draw random numbers."""
    while type(dataset) is Subset:
        dataset = dataset.dataset
    if type(dataset) is ConcatDataset:
        return any(_draws(each) for each in dataset.datasets)
    return type(dataset) not in (TensorDataset, list, tuple, range) and getattr(dataset, "draws", True)
