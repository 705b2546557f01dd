"""Splits a stream between the workers of all ranks, and draws its batches: in a worker process, or without workers in
the training process."""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.utils.data import IterableDataset, get_worker_info

from hydraloop.data.batching import Collate, private_generators, seed_generators
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.seeding import mix_seed
from hydraloop.errors import UserError

_STREAM = 3  # separates these seeds from others of the run
_END = object()


class Source(NamedTuple):
    """A set, and how its samples are split between the copies of it, of which each worker of each rank has one."""

    dataset: Any
    split: Literal["own", "method", "samples"]
    """`own`: by the set itself; `method`: by `dataset.split(index, count)`; `samples`: each copy keeps every n-th."""
    copies: tuple[int, int]
    """(The first copy of this rank, copies of all ranks.)"""
    seed: int
    """The seed of the run."""


class StreamPlace(NamedTuple):
    """Where a stream is read, in the run and in the config."""

    ranks: Distributed
    """The processes that share the stream."""
    seed: int
    """The seed of the run."""
    device: torch.device | None
    """The device to which the batches will be copied."""
    key: str
    """The key of the data set in the config (`data.train`), for errors."""
    keys: Mapping[str, str]
    """The keys of the options in the config, for errors."""


def split(dataset: Any, options: Mapping[str, Any], place: StreamPlace) -> Source:
    """Return the set with the way in which it is split between the workers of all ranks.

    A Hugging Face set splits itself. A method `split(index, count)` is asked for the part of each worker. Any other
    set of a plain class is read whole by each worker, which keeps every n-th sample. A torch IterableDataset may split
    itself between workers (torch asks for it) or not, so the user must say it, in the option `split_stream`.
    """
    rank, world_size, wanted = place.ranks.rank, place.ranks.world_size, options["split_stream"]
    workers = max(options["num_workers"], 1)
    copies = rank * workers, world_size * workers
    if copies[1] == 1 or wanted is False:
        return Source(dataset, "own", copies, place.seed)
    if is_hugging_face(dataset):
        if world_size > 1:
            theirs = importlib.import_module("datasets.distributed")  # installed, because the set is of its class
            dataset = theirs.split_dataset_by_node(dataset, rank, world_size)
        return Source(dataset, "own", copies, place.seed)
    if callable(getattr(dataset, "split", None)):
        return Source(dataset, "method", copies, place.seed)
    if wanted is None and isinstance(dataset, IterableDataset):
        raise UserError(
            f"{type(dataset).__name__} does not say how {copies[1]} workers (of all ranks) share it",
            key=place.key,
            remedy="Give it a method split(index, count) that returns a part of it. Or set "
            f"{place.keys['split_stream']}=true to let each worker keep every n-th sample, or =false if it splits "
            "itself between ranks and workers.",
        )
    return Source(dataset, "samples", copies, place.seed)


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


@dataclass
class WorkerPosition:
    """Where a worker is. Not a mapping, so that torch does not pin what is in it."""

    passes: int = 0
    """Ends of the stream that it has passed."""
    samples: int = 0
    """Samples that it has read in this pass."""
    state: Any = None
    """The state of the stream after them; None if it has no `state_dict`."""


class WorkerBatch(NamedTuple):
    """A batch, with the position of the worker after it."""

    worker: int
    position: WorkerPosition
    batch: Any


class NoSamples(NamedTuple):
    """A copy of the stream has no samples."""

    copy: int
    """Its number, from 0."""


class BatchedStream(IterableDataset[Any]):
    """Yields a `WorkerBatch` for each batch, in each worker of a DataLoader that does not collate.

    For training it is endless: a stream that ends begins its next pass in the same batch. Otherwise each sample is read
    once, and the last batch may be short; a worker may have no samples. If there are none in training, it yields
    `NoSamples`.

    What the stream and `collate` draw from the generators of random, numpy and torch (CPU) is a function of the seed,
    the copy, the pass and the number of the sample. The generators of this process keep their states.

    Args:
        source: the stream.
        collate: makes a batch of a list of samples.
        batch_size: samples in a batch, 1 or more.
        positions: where each worker begins, for training; None: each sample is read once, from the first one.
        first: the worker whose batch is the next one. torch asks worker 0 first, so those before it yield None once.
    """

    def __init__(
        self,
        source: Source,
        collate: Collate,
        batch_size: int,
        positions: Sequence[WorkerPosition] | None = None,
        first: int = 0,
    ) -> None:
        self._source, self._collate, self._batch_size = source, collate, batch_size
        self._endless, self._positions, self._first = positions is not None, positions, first

    def __iter__(self) -> Iterator[WorkerBatch | NoSamples | None]:
        info = get_worker_info()
        worker = 0 if info is None else info.id
        if worker < self._first:
            yield None
        begin = WorkerPosition() if self._positions is None else self._positions[worker]
        copy_of_this = self._source.copies[0] + worker
        with private_generators():
            reader = _Reader(self._source, copy_of_this, begin, endless=self._endless)
        while True:
            with private_generators():
                samples, numbers = self._samples(reader)
                batch = self._collate(samples, numbers) if samples else None
            if not samples:
                if self._endless:
                    yield NoSamples(copy_of_this)
                return
            yield WorkerBatch(worker, reader.position(), batch)

    def _samples(self, reader: _Reader) -> tuple[list[Any], list[int]]:
        """Return the samples of the next batch and their numbers; fewer, or none, at the end of the stream."""
        drawn: list[Any] = []
        numbers: list[int] = []
        while len(drawn) < self._batch_size:
            sample = reader.next()
            if sample is _END:
                return ([], []) if self._endless else (drawn, numbers)
            drawn.append(sample)
            numbers.append(reader.samples - 1)
        return drawn, numbers


class _Reader:
    """Reads one copy of a stream, pass after pass."""

    def __init__(self, source: Source, number: int, begin: WorkerPosition, *, endless: bool) -> None:
        self._dataset, part = source.dataset, (number, source.copies[1])
        if get_worker_info() is not None and is_hugging_face(self._dataset):
            self._dataset = copy.deepcopy(self._dataset)  # its epoch is in memory that all workers share
        if source.split == "method":
            self._dataset = self._dataset.split(*part)
        # With `samples`, every copy must read the same stream, also if the stream shuffles itself.
        by_samples = source.split == "samples"
        self._part, self._parts = part if by_samples else (0, 1)
        self._seeds, self._endless = (_STREAM, source.seed, 0 if by_samples else number), endless
        self.passes, self.samples = begin.passes, begin.samples
        self._iterator = self._begin(begin.state)

    def next(self) -> Any:
        """Return the next sample of this copy; `_END` after the last one, or if a whole pass has none."""
        kept = self.samples > self._part
        while True:
            self._seed(self.samples)
            sample = next(self._iterator, _END)
            if sample is not _END:
                self.samples += 1
                if (self.samples - 1) % self._parts == self._part:
                    return sample
            elif self._endless and kept:
                self.passes, self.samples, kept = self.passes + 1, 0, False
                self._iterator = self._begin(None)
            else:
                return _END

    def position(self) -> WorkerPosition:
        """Return the position after the last sample."""
        # A copy, because the stream may change what it returned while a queue or a checkpoint still has it.
        state = copy.deepcopy(self._dataset.state_dict()) if _has_state(self._dataset) else None
        return WorkerPosition(self.passes, self.samples, state)

    def _begin(self, state: Any) -> Iterator[Any]:
        """Begin the current pass, at the state or, without one, by reading forward."""
        self._pass_seed = mix_seed(*self._seeds, self.passes)
        self._seed(0)
        if callable(getattr(self._dataset, "set_epoch", None)):
            self._dataset.set_epoch(self.passes)
        if state is not None:
            self._dataset.load_state_dict(state)
        iterator: Iterator[Any] = iter(self._dataset)
        if state is None:
            for number in range(self.samples):
                self._seed(number)
                next(iterator, None)
        return iterator

    def _seed(self, number: int) -> None:
        seed_generators(mix_seed(self._pass_seed, number))


def _has_state(dataset: object) -> bool:
    return all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
