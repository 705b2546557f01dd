"""A loader whose order and draws do not depend on the global random state, and which can start inside an epoch."""

from __future__ import annotations

import multiprocessing.context
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hydraloop.data.collate import Collate, explained, misfit
from hydraloop.data.loader_options import check_ranges
from hydraloop.data.order import Drawn, index, indices, made_for
from hydraloop.data.sampler import EpochBatches, EpochSampler, mix_seed
from hydraloop.data.seeded import Seeded, as_is
from hydraloop.engine.device.batch_transfer import has_streams
from hydraloop.engine.interruption.worker_signals import QuietWorker, ended_at_exit
from hydraloop.engine.loaders import end_workers
from hydraloop.errors import UserError

_WORKERS = 1  # separates the seeds of the workers from that of the order


class PartLoader:
    """The batches of a data set, with an order and draws that depend only on the seed, the epoch and the sample.

    `len(loader)` is the number of batches in a whole epoch. Created by `build_loader`. This class is for samplers that
    split an epoch between the ranks themselves, so that the samples of other ranks are not known.

    Args:
        seeded: the data set, with its `Collate`.
        order: of this rank's batches.
        batch_size: the largest number of samples in a batch of this rank; None: the order is one of batches.
        global_batch: samples of a full global batch; None: the order is one of batches.
        seed: of what workers draw outside of samples.
        key: of the data set in the config, for errors.
        keys: of the options in the config, for errors.
        options: of torch's DataLoader.
    """

    calls_set_epoch = True
    """The data set gets the epoch in the processes that load it."""

    def __init__(
        self, seeded: Seeded, order: EpochSampler | EpochBatches, *, batch_size: int | None, global_batch: int | None,
        seed: int, key: str, keys: Mapping[str, str], **options: Any
    ) -> None:  # fmt: skip
        self.dataset, self.seeded, self.order = seeded.dataset, seeded, order
        self.batch_size, self.global_batch, self.key, self.keys = batch_size, global_batch, key, keys
        self.num_workers: int = options["num_workers"]
        self._seed, self._generator = seed, torch.Generator()
        self._torch: DataLoader[Any] = DataLoader(
            cast(Dataset[Any], seeded),
            batch_sampler=cast(Any, order),
            collate_fn=as_is,
            generator=self._generator,
            **options,
        )

    @property
    def collate_fn(self) -> Collate:
        """Makes a batch of a list of samples. It cannot be replaced: workers have copies of it."""
        return self.seeded.collate

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (from 0) of the next iteration, on which its order and its draws depend."""
        self.order.epoch = epoch

    def begin(self, first: int, iteration: int) -> Iterator[Any]:
        """Return the batches of the epoch from index `first` on, without loading the others; see `TrainLoader`."""
        self.order.first = first
        # torch draws the workers' base seed from this generator, and worker i seeds torch, random and numpy with
        # base + i. Only `worker_init_fn` draws from them. Persistent workers are seeded when they start.
        self._generator.manual_seed(mix_seed(self._seed, self.epoch, _WORKERS))
        return explained(ended_at_exit(self._torch), self, first)

    def state_at(self, first: int, iteration: int) -> dict[str, Any] | None:
        """Return None: the order follows from (seed, epoch); see `TrainLoader`."""
        return None

    def load_state(self, state: dict[str, Any] | None, first: int, iteration: int) -> None:
        """Do nothing; see `TrainLoader`."""

    def end_workers(self) -> None:
        """End the workers; the next iteration starts new ones with copies of the current data set."""
        end_workers(self._torch)

    @property
    def epoch(self) -> int:
        """The epoch (from 0) of the current or next iteration."""
        return self.order.epoch or 0

    def indices_at(self, batch_idx: int, epoch: int) -> list[int]:
        """Return the indices of this rank's samples in a batch, or of its filler; see `EpochSampler.request`."""
        return self.order.request(batch_idx, epoch).indices

    def misfit(self, samples: Any, number: int) -> UserError | None:
        """Return what to say if `collate_fn` fails for batch `number` of the data set's order; None if it does not."""
        if not isinstance(samples, list):
            return None
        first = number * (self.batch_size or len(samples))
        return misfit(self.collate_fn, samples, range(first, first + len(samples)), self.key, "dataset[{}]")

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Any]:
        return self.begin(0, 0)


class Loader(PartLoader):
    """A loader whose ranks have equal parts of each global batch; it knows the samples of all ranks.

    `len(loader)` is the same on all ranks. Created by `build_loader`.
    """

    def samples_at(self, batch_idx: int) -> tuple[int, int]:
        """Return the number of samples that count in a batch, as (on this rank, on all ranks).

        In the last global batch, a rank may have no samples left. It then gets a filler batch with samples of other
        ranks, so that it can take part in collectives, and (0, n) is returned. No host sync; about 0.1 µs.

        Args:
            batch_idx: number of the batch in the epoch, from 0, also if the iteration started inside the epoch.

        Raises:
            IndexError: an epoch has no such batch.
        """
        return self.order.samples_at(batch_idx)


def build_loader(
    dataset: Dataset[Any],
    *,
    shuffle: bool,
    seed: int = 0,
    batch_size: int = 64,
    num_workers: int = 0,
    pin_memory: bool | Literal["auto"] = "auto",
    drop_last: bool = False,
    persistent_workers: bool = True,
    prefetch_factor: int | None = None,
    timeout: float = 0.0,
    collate_fn: Callable[[Any], Any] | None = None,
    sampler: Any = None,
    batch_sampler: Any = None,
    worker_init_fn: Callable[[int], None] | None = None,
    multiprocessing_context: str | multiprocessing.context.BaseContext | None = None,
    device: torch.device | None = None,
    key: str = "data",
    keys: Mapping[str, str] | None = None,
    rank: int = 0,
    world_size: int = 1,
    global_batch: int | None = None,
) -> PartLoader:
    """Return a loader over a data set, or over this rank's part of it (see `EpochSampler`).

    It is a `Loader`, unless the sampler has `num_replicas` and so splits an epoch itself.

    Args:
        dataset: must have a length. Its `__getitems__`, if it has one, may return a stacked batch.
        shuffle: use a new order in each epoch, for training.
        seed: the run's seed, 0 or more; the same on all ranks.
        batch_size: samples per batch on each rank, at least 1.
        num_workers: processes that load batches; 0 loads in the training process.
        pin_memory: copy batches into page-locked memory; "auto": if copies to `device` can be asynchronous.
        drop_last: drop the last global batch of an epoch if it is incomplete.
        persistent_workers: keep the workers, which have copies of the data set, between epochs. No effect without
            workers.
        prefetch_factor: batches that each worker loads ahead; None: torch's default, 2. No effect without workers.
        timeout: seconds after which waiting for a worker is an error; 0: wait forever. No effect without workers.
        collate_fn: makes a batch of a list of samples; None: torch's `default_collate`. An error at the first batch if
            the data set stacks its batches.
        sampler: yields the indices of an epoch, of all ranks; or of this one, if it has `num_replicas`. Its draws are
            seeded, see `Drawn`. A function, or a `functools.partial` of a class, is called with the data set. None: all
            samples, shuffled or in order.
        batch_sampler: as `sampler`, but yields lists of indices, each the batch of one rank (see `EpochBatches`).
            `batch_size` and `drop_last` then have no effect.
        worker_init_fn: called in each worker with its number, after the seeds are set. No effect without workers.
        multiprocessing_context: how workers are started (`spawn`); None: torch's default. No effect without workers.
        device: to which the batches will be copied.
        key: of the data set in the config (`data.train`), for errors.
        keys: of the options in the config, for errors; None: `data.loader.<option>`.
        rank: this process's number, 0 .. world_size - 1.
        world_size: number of processes that share the samples.

    Raises:
        UserError: the data set is an IterableDataset, is empty, has fewer samples than ranks (with `shuffle`) or than
            one global batch (with `drop_last`), or an option is out of range.
        ValueError: the rank is out of range.
    """
    values = {
        "batch_size": batch_size, "num_workers": num_workers, "pin_memory": pin_memory, "timeout": timeout,
        "prefetch_factor": prefetch_factor, "multiprocessing_context": multiprocessing_context,
        "sampler": sampler, "batch_sampler": batch_sampler, "collate_fn": collate_fn,
    }  # fmt: skip
    keys = keys or {name: f"data.loader.{name}" for name in values}
    check_ranges(values, keys)
    if isinstance(dataset, IterableDataset):
        raise UserError(
            f"{type(dataset).__name__} is an IterableDataset, whose length and order are unknown",
            key=key,
            remedy="Use a data set with __len__ and __getitem__, so that an epoch can be counted and resumed.",
        )
    samples = len(dataset)  # type: ignore[arg-type]  # torch leaves __len__ out of Dataset; a map-style one has it
    if samples == 0:
        raise UserError("the data set is empty", key=key, remedy="Check its path and its split.")
    which = "sampler" if batch_sampler is None else "batch_sampler"
    draws = made_for(values[which], dataset, rank, world_size, keys[which])
    splits = draws is not None and hasattr(draws, "num_replicas")
    if splits and draws.num_replicas != world_size:
        raise UserError(
            f"{type(draws).__name__} splits an epoch for {draws.num_replicas} processes, and there are {world_size}",
            key=keys[which],
            remedy="Set _partial_: true and leave num_replicas and rank out: they are then given to the class.",
        )
    share = {} if splits else {"rank": rank, "world_size": world_size}
    if batch_sampler is None:
        drawn = None if draws is None else Drawn(draws, index, samples=samples, seed=seed, key=keys[which])
        samples = samples if drawn is None else len(drawn)
        if global_batch is None or splits:
            global_batch = batch_size * world_size
        of_all = batch_size if splits else global_batch  # a sampler that splits has the samples of one rank
        _check_samples(samples, of_all, 1 if splits else world_size, shuffle=shuffle, drop_last=drop_last, key=key)
        order: EpochSampler | EpochBatches = EpochSampler(
            range(samples), shuffle=shuffle, seed=seed, batch_size=of_all, drop_last=drop_last, order=drawn, **share
        )
    else:
        batches = Drawn(draws, indices, samples=samples, seed=seed, key=keys[which])
        order = EpochBatches(batches, batches=None if splits else global_batch, **share)
    collate = Collate(collate_fn, keys["collate_fn"])
    of_draws = mix_seed(seed, rank) if splits and rank else seed  # a position is then one of each rank
    workers = num_workers > 0
    return (PartLoader if splits else Loader)(
        Seeded(dataset, collate, of_draws, repeats=draws is not None),
        order,
        batch_size=None if global_batch is None or batch_sampler is not None else -(-global_batch // world_size),
        global_batch=None if batch_sampler is not None else global_batch,
        seed=mix_seed(seed, rank),
        key=key,
        keys=keys,
        num_workers=num_workers,
        pin_memory=has_streams(device) if pin_memory == "auto" and device is not None else pin_memory is True,
        persistent_workers=persistent_workers and workers,
        prefetch_factor=prefetch_factor if workers else None,
        timeout=timeout if workers else 0.0,
        worker_init_fn=QuietWorker(worker_init_fn) if workers else None,
        multiprocessing_context=multiprocessing_context if workers else None,
    )


def _check_samples(
    samples: int, global_batch: int, world_size: int, *, shuffle: bool, drop_last: bool, key: str
) -> None:
    """Refuse a data set that leaves a rank without samples to train on. For an evaluation, that is allowed."""
    if shuffle and samples < world_size:
        raise UserError(
            f"{samples} samples cannot be shared by {world_size} processes",
            key=key,
            remedy=f"Use at most {samples} processes, or more data.",
        )
    if drop_last and samples < global_batch:
        fits, batch_size = samples // world_size, -(-global_batch // world_size)
        smaller = f"data.loader.batch_size={fits} or less, or " if fits else ""
        each = f" for each of {world_size} processes" if world_size > 1 else ""
        raise UserError(
            f"{samples} samples are less than a batch of {batch_size}{each}, and drop_last drops the incomplete batch",
            key=key,
            remedy=f"Use {smaller}data.loader.drop_last=false.",
        )
