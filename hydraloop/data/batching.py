"""How loaders make a batch: the options of torch's DataLoader, collating, and draws that follow from a seed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
from omegaconf import DictConfig
from torch.utils.data import default_collate, get_worker_info

from hydraloop.engine.batch_transfer import has_streams
from hydraloop.engine.loaders import data_sets_with
from hydraloop.engine.seeding import mix_seed
from hydraloop.engine.signals import QuietWorker
from hydraloop.errors import UserError
from hydraloop.files.result import describe
from hydraloop.safety.instantiate import instantiate, instantiate_callable
from hydraloop.schemas.data import loader_options

_FUNCTIONS, _SAMPLERS = ("collate_fn", "worker_init_fn"), ("sampler", "batch_sampler")
_OF_WORKERS = ("prefetch_factor", "timeout", "multiprocessing_context")


def dataloader_options(options: Mapping[str, Any], device: torch.device | None) -> dict[str, Any]:
    """Return the options of torch's DataLoader; those of workers only if there are some.

    Args:
        options: of a loader.
        device: to which the batches will be copied.
    """
    pin_memory, workers = options["pin_memory"], options["num_workers"]
    if pin_memory == "auto":
        pin_memory = device is not None and has_streams(device)
    found: dict[str, Any] = {"num_workers": workers, "pin_memory": pin_memory}
    if workers:
        found |= {name: options[name] for name in _OF_WORKERS}
        found["worker_init_fn"] = QuietWorker(options["worker_init_fn"])
    return found


def options_from_config(data: DictConfig, split: str) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the options of a split's loader, with its functions and objects, and the key that sets each option.

    Raises:
        UserError: an option is unknown or cannot be built; names its key.
    """
    values, keys = loader_options(data, split)
    for name in _FUNCTIONS:
        if values[name] is not None:
            values[name] = instantiate_callable(values[name], keys[name])
    for name in _SAMPLERS:
        if values[name] is not None:
            values[name] = instantiate(values[name], keys[name])
    return values, keys


class CollateError(Exception):
    """A collate function has failed. Its text names the samples. Raised in the process that loads the batch."""


class Collate:
    """Makes a batch of a list of samples. A class, so that workers can unpickle it.

    Args:
        collate_fn: of the user. None: torch's `default_collate`, and a batch that the data set has stacked stays as it
            is.
        key: of `collate_fn` in the config, for errors.
        data: key of the data set in the config, for errors.
    """

    def __init__(self, collate_fn: Callable[[Any], Any] | None, key: str, data: str) -> None:
        self.stack, self.key, self.data, self.given = collate_fn or default_collate, key, data, collate_fn is not None

    def __call__(self, fetched: Any, numbers: Sequence[int]) -> Any:
        """Return the batch of what was fetched for the samples with these numbers.

        Raises:
            CollateError: the collate function has failed.
        """
        if not self.given and not isinstance(fetched, list):
            return fetched
        try:
            return self.stack(fetched)
        except Exception as error:
            function = getattr(self.stack, "func", self.stack)
            name = getattr(function, "__name__", type(function).__name__)
            raise CollateError(
                f"{name} fails for the samples {[*numbers]} of {self.data}: {describe(error)}"
            ) from error

    def mistake(self, error: CollateError) -> UserError:
        """Return what to say of an error that was raised in this process or in a worker."""
        text = str(error).rpartition("CollateError: ")[2].strip()  # after the worker's traceback, if there is one
        remedy = f"Look at these samples, or set {self.key} to a function that can batch them."
        return UserError(text, key=self.key, remedy=remedy)


def as_is(batch: Any) -> Any:
    """Return a batch that is already made; at module level, so that workers can unpickle it."""
    return batch


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
