"""A torch DataLoader that does not use the global random state and can start inside an epoch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from hydraloop.data.sampler import EpochSampler, mix_seed
from hydraloop.engine.device.batch_transfer import has_streams
from hydraloop.errors import UserError

_WORKERS = 1  # separates the seeds of the workers from that of the order


class Loader(DataLoader[Any]):
    """torch's DataLoader, with an order and worker seeds that depend only on (seed, epoch, rank).

    `len(loader)` is the number of batches in a whole epoch, the same on all ranks. Created by `build_loader`.
    """

    sampler: EpochSampler
    generator: torch.Generator

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch (from 0) of the next iteration, which determines its order and the seeds of its workers."""
        self.sampler.set_epoch(epoch)

    def set_position(self, samples: int) -> None:
        """Skip the first `samples` of this rank's part, in the next iteration only; see `EpochSampler`."""
        self.sampler.set_position(samples)

    def begin(self, first: int, iteration: int) -> Iterable[Any]:
        """Return the batches of the epoch from index `first` on, without loading the others; see `TrainLoader`."""
        assert self.batch_size is not None
        self.set_position(min(first * self.batch_size, len(self.sampler)))
        return self

    def state_at(self, first: int, iteration: int) -> dict[str, Any] | None:
        """Return None: the order follows from (seed, epoch); see `TrainLoader`."""
        return None

    def load_state(self, state: dict[str, Any] | None, first: int, iteration: int) -> None:
        """Do nothing; see `TrainLoader`."""

    def samples_at(self, batch_idx: int) -> tuple[int, int]:
        """Return the number of samples that count in a batch, as (on this rank, on all ranks).

        In the last global batch, a rank may have no samples left. It then gets a filler batch with samples of other
        ranks, so that it can take part in collectives, and (0, n) is returned. No host sync; about 0.1 µs.

        Args:
            batch_idx: number of the batch in the epoch, from 0, also if the iteration started inside the epoch.

        Raises:
            IndexError: an epoch has no such batch.
        """
        return self.sampler.samples_at(batch_idx)

    @property
    def epoch(self) -> int:
        """The epoch (from 0) of the current or next iteration."""
        return self.sampler.epoch

    def indices_at(self, batch_idx: int, epoch: int) -> list[int]:
        """Return the indices of this rank's samples in a batch. Computes the whole order; see `EpochSampler`."""
        return self.sampler.indices_at(batch_idx, epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # torch annotates its own class for it
        # torch draws the workers' base seed from this generator, and worker i seeds torch, random and numpy with
        # base + i. With persistent workers this happens only in the first epoch. Ranks draw different numbers.
        sampler = self.sampler
        own = (sampler.rank,) if sampler.rank else ()
        self.generator.manual_seed(mix_seed(sampler.seed, sampler.epoch, _WORKERS, *own))
        return super().__iter__()


def build_loader(
    dataset: Dataset[Any],
    *,
    shuffle: bool,
    seed: int = 0,
    batch_size: int = 64,
    num_workers: int = 0,
    pin_memory: bool | Literal["auto"] = "auto",
    drop_last: bool = False,
    persistent_workers: bool = False,
    prefetch_factor: int | None = None,
    timeout: float = 0.0,
    collate_fn: Callable[[Any], Any] | None = None,
    device: torch.device | None = None,
    key: str = "data",
    rank: int = 0,
    world_size: int = 1,
) -> Loader:
    """Return a loader over a data set, or over this rank's part of it (see `EpochSampler`).

    Args:
        dataset: must have a length. Its `__getitems__`, if it has one, may return a stacked batch.
        shuffle: use a new order in each epoch, for training.
        seed: the run's seed, 0 or more; the same on all ranks.
        batch_size: samples per batch on each rank, at least 1.
        num_workers: processes that load batches; 0 loads in the training process.
        pin_memory: copy batches into page-locked memory; "auto": if copies to `device` can be asynchronous.
        drop_last: drop the last global batch of an epoch if it is incomplete.
        persistent_workers: keep the workers between epochs. No effect without workers.
        prefetch_factor: batches that each worker loads ahead; None: torch's default, 2. No effect without workers.
        timeout: seconds after which waiting for a worker is an error; 0: wait forever. No effect without workers.
        collate_fn: makes a batch of a list of samples; None: torch's `default_collate`. Not called for a batch that
            the data set has stacked.
        device: to which the batches will be copied.
        key: of the data set in the config (`data.train`), for errors.
        rank: this process's number, 0 .. world_size - 1.
        world_size: number of processes that share the samples.

    Raises:
        UserError: the data set is an IterableDataset, is empty, has fewer samples than ranks (with `shuffle`) or than
            one global batch (with `drop_last`), or an option is out of range.
        ValueError: the rank is out of range.
    """
    _check_options(batch_size, num_workers, pin_memory, prefetch_factor, timeout)
    if isinstance(dataset, IterableDataset):
        raise UserError(
            f"{type(dataset).__name__} is an IterableDataset, whose length and order are unknown",
            key=key,
            remedy="Use a data set with __len__ and __getitem__, so that an epoch can be counted and resumed.",
        )
    samples = len(dataset)  # type: ignore[arg-type]  # torch leaves __len__ out of Dataset; a map-style one has it
    _check_samples(samples, batch_size, world_size, shuffle=shuffle, drop_last=drop_last, key=key)
    if pin_memory == "auto":
        pin_memory = device is not None and has_streams(device)
    sampler = EpochSampler(
        dataset,  # type: ignore[arg-type]  # has a length, see above
        shuffle=shuffle,
        seed=seed,
        batch_size=batch_size,
        drop_last=drop_last,
        rank=rank,
        world_size=world_size,
    )
    return Loader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        pin_memory=pin_memory,
        drop_last=drop_last,
        persistent_workers=persistent_workers and num_workers > 0,
        prefetch_factor=prefetch_factor if num_workers > 0 else None,
        timeout=timeout if num_workers > 0 else 0.0,
        collate_fn=_Collate(default_collate if collate_fn is None else collate_fn),
        generator=torch.Generator(),
    )


def _check_samples(samples: int, batch_size: int, world_size: int, *, shuffle: bool, drop_last: bool, key: str) -> None:
    """Refuse a data set that leaves a rank without samples to train on. For an evaluation, that is allowed."""
    if samples == 0:
        raise UserError("the data set is empty", key=key, remedy="Check its path and its split.")
    if shuffle and samples < world_size:
        raise UserError(
            f"{samples} samples cannot be shared by {world_size} processes",
            key=key,
            remedy=f"Use at most {samples} processes, or more data.",
        )
    if drop_last and samples < batch_size * world_size:
        fits = samples // world_size
        smaller = f"data.loader.batch_size={fits} or less, or " if fits else ""
        each = f" for each of {world_size} processes" if world_size > 1 else ""
        raise UserError(
            f"{samples} samples are less than a batch of {batch_size}{each}, and drop_last drops the incomplete batch",
            key=key,
            remedy=f"Use {smaller}data.loader.drop_last=false.",
        )


def _check_options(
    batch_size: int, num_workers: int, pin_memory: object, prefetch_factor: int | None, timeout: float
) -> None:
    """Refuse values for which torch raises other errors, or none."""
    for name, value, least, remedy in (
        ("batch_size", batch_size, 1, "Use 1 or more."),
        ("num_workers", num_workers, 0, "Use 0 to load in the training process."),
        ("prefetch_factor", prefetch_factor, 1, "Use 1 or more, or null."),
        ("timeout", timeout, 0, "Use 0 to wait forever."),
    ):
        if value is not None and value < least:
            raise UserError(f"cannot be {value}", key=f"data.loader.{name}", remedy=remedy)
    if pin_memory not in (True, False, "auto"):
        raise UserError(f"cannot be {pin_memory!r}", key="data.loader.pin_memory", remedy="Use auto, true or false.")


class _Collate:
    """Stacks a list of samples, and returns a stacked batch as it is. A class, so that workers can unpickle it."""

    def __init__(self, stack: Callable[[Any], Any]) -> None:
        self.stack = stack

    def __call__(self, fetched: Any) -> Any:
        return self.stack(fetched) if isinstance(fetched, list) else fetched
