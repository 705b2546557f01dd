"""Loads the batch of a request, with draws that follow from its seed. The run's generators keep their states."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from torch.utils.data import get_worker_info

from hydraloop.data.collate import Collate
from hydraloop.engine.device.seeding import mix_seed
from hydraloop.engine.loaders import data_sets_with

_BATCH = 5  # separates these seeds from others of the run
_numpy: Any = numpy.random  # its stubs lack public names
_PRIVATE = _numpy.MT19937()
"""NumPy's generator while the training process loads data."""


class BatchRequest(NamedTuple):
    """A batch to be loaded, in a worker or in the training process."""

    indices: list[int]
    """Of this rank's samples in the data set."""
    epoch: int | None
    """From 0. None: `set_epoch` of the loader has not been called, as for an evaluation; draws are those of epoch 0."""
    number: int
    """The batch in the epoch, from 0."""


class SeededFetcher:
    """A data set as torch's DataLoader sees it: its samples are the batches of requests.

    Before each batch, the global generators (torch's on the CPU, NumPy's and Python's) are seeded by (seed, epoch,
    number of the batch). So draws do not depend on the workers, on what they load ahead, or on where a run began.

    `set_epoch(epoch)` of the data set, and of those it wraps, is called in the process that loads, before the first
    batch of an epoch.

    Args:
        dataset: with `__getitem__`; `__getitems__` is used if it has it.
        collate: makes a batch of a list of samples.
        seed: of the run and the rank.
    """

    def __init__(self, dataset: Any, collate: Collate, seed: int) -> None:
        self.dataset, self.collate, self.seed = dataset, collate, seed
        self._epoch: int | None = None

    def __getitems__(self, request: BatchRequest) -> Any:
        """Return the batch of a request."""
        with private_generators():
            return self.collate(self._fetched(request), request.indices)

    def samples(self, request: BatchRequest) -> Any:
        """Return the samples of a request, or what the data set has stacked of them."""
        with private_generators():
            return self._fetched(request)

    def _fetched(self, request: BatchRequest) -> Any:
        indices, epoch, number = request
        seed_generators(mix_seed(self.seed, epoch or 0, _BATCH, number))
        dataset = self.dataset
        try:
            if epoch != self._epoch:
                self._set_epoch(epoch)
            if getattr(dataset, "__getitems__", None) is not None:
                return dataset.__getitems__(indices)
            return [dataset[index] for index in indices]
        except Exception as error:
            error.add_note(f"{self.collate.data}: samples {indices}, in epoch {(epoch or 0) + 1}")
            raise

    def _set_epoch(self, epoch: int | None) -> None:
        self._epoch = epoch
        for data in data_sets_with("set_epoch", self):
            data.set_epoch(epoch)


@contextmanager
def private_generators() -> Iterator[None]:
    """Restore the states of the global generators of the CPU after the body. In a loader worker, do nothing.

    The second number of a pair that `numpy.random.randn` has drawn and not yet returned is lost. To keep it takes
    70 µs, because NumPy has it only in a copy of the whole state. As the body runs before every batch, a resumed run
    loses the same numbers.
    """
    if get_worker_info() is not None:
        yield
        return
    python, of_torch, of_numpy = random.getstate(), torch.default_generator.get_state(), _numpy.get_bit_generator()
    _numpy.set_bit_generator(_PRIVATE)
    try:
        yield
    finally:
        random.setstate(python)
        torch.default_generator.set_state(of_torch)
        _numpy.set_bit_generator(of_numpy)


def seed_generators(seed: int) -> None:
    """Seed the global generators of the CPU; 0 <= seed < 2^32."""
    random.seed(seed)
    torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which also seeds the devices
    _numpy.seed(seed)
