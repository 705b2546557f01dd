"""A loader whose order and draws do not depend on the global random state, and which can start inside an epoch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, Unpack, cast

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset

from hydraloop.data.collate import Collate, explained, misfit
from hydraloop.data.custom_sampler import CustomOrder, as_index, as_indices, create_sampler
from hydraloop.data.loader_options import LoaderOptions, check_ranges, dataloader_options, with_defaults
from hydraloop.data.sampler import EpochBatchSampler, EpochOrder, EpochSampler
from hydraloop.data.seeded_fetcher import SeededFetcher, as_is
from hydraloop.data.seeds import mix_seed
from hydraloop.engine.interruption.worker_signals import ended_at_exit
from hydraloop.engine.loaders import end_workers
from hydraloop.errors import UserError

_WORKERS = 1  # separates the seeds of the workers from that of the order


class MapStyleLoader:
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
        self, seeded: SeededFetcher, order: EpochOrder, *, batch_size: int | None, global_batch: int | None, seed: int,
        key: str, keys: Mapping[str, str], **options: Any
    ) -> None:  # fmt: skip
        self.dataset, self.seeded, self.order = seeded.dataset, seeded, order
        self.batch_size, self.global_batch, self.key, self.keys = batch_size, global_batch, key, keys
        self.num_workers: int = options["num_workers"]
        self._seed, self._generator = seed, torch.Generator()
        if seeded.may_draw and not seeded.by_batch:
            order.with_seeds = seeded.with_seeds
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
        here = not (self.num_workers or self._torch.pin_memory)  # torch's iterator would take 15 µs a batch more
        return explained(map(self.seeded.__getitems__, self.order) if here else ended_at_exit(self._torch), self, first)

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


class GlobalBatchLoader(MapStyleLoader):
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
    device: torch.device | None = None,
    key: str = "data",
    keys: Mapping[str, str] | None = None,
    rank: int = 0,
    world_size: int = 1,
    global_batch: int | None = None,
    **options: Unpack[LoaderOptions],
) -> MapStyleLoader:
    """Return a loader over a data set, or over this rank's part of it (see `EpochSampler`).

    It is a `GlobalBatchLoader`, unless the sampler has `num_replicas` and so splits an epoch itself.

    Args:
        dataset: must have a length. Its `__getitems__`, if it has one, may return a stacked batch.
        shuffle: use a new order in each epoch, for training.
        seed: the run's seed, 0 or more; the same on all ranks.
        device: to which the batches will be copied.
        key: of the data set in the config (`data.train`), for errors.
        keys: of the options in the config, for errors; None: `data.loader.<option>`.
        rank: this process's number, 0 .. world_size - 1.
        world_size: number of processes that share the samples.
        global_batch: samples of a global batch, or its batches with a `batch_sampler`; None: one batch for each rank.
        options: as in `data.loader`, with objects instead of nodes.

    Raises:
        UserError: the data set is an IterableDataset, is empty, has fewer samples than ranks (with `shuffle`) or than
            one global batch (with `drop_last`), or an option is out of range.
        ValueError: the rank is out of range.
    """
    conf = with_defaults(options)
    keys = keys or {name: f"data.loader.{name}" for name in vars(conf)}
    check_ranges(vars(conf), keys)
    samples = _length(dataset, key)
    batched = conf.batch_sampler is not None
    key_of_order = keys["batch_sampler" if batched else "sampler"]
    draws = create_sampler(conf.batch_sampler if batched else conf.sampler, dataset, rank, world_size, key_of_order)
    splits = hasattr(draws, "num_replicas")
    if splits:
        _check_split(draws, world_size, key_of_order)
        global_batch = None
    share: dict[str, Any] = {} if splits else {"rank": rank, "world_size": world_size}
    drawn = partial(CustomOrder, draws, samples=samples, seed=seed, key=key_of_order)
    batch_size: int | None = None
    if batched:
        order: EpochOrder = EpochBatchSampler(drawn(as_indices), batches=global_batch, **share)
    else:
        global_batch = global_batch or conf.batch_size * world_size
        batch_size = -(-global_batch // world_size)
        of_all = batch_size if splits else global_batch  # a sampler that splits has the samples of one rank
        items = None if draws is None else drawn(as_index)
        samples = samples if items is None else len(items)
        epoch = {"shuffle": shuffle, "drop_last": conf.drop_last}
        _check_samples(samples, of_all, 1 if splits else world_size, key=key, **epoch)
        order = EpochSampler(range(samples), seed=seed, batch_size=of_all, order=items, **epoch, **share)
    of_draws = mix_seed(seed, rank) if splits and rank else seed  # a position is then one of each rank
    return (MapStyleLoader if splits else GlobalBatchLoader)(
        SeededFetcher(dataset, Collate(conf.collate_fn, keys["collate_fn"]), of_draws, repeats=draws is not None),
        order,
        batch_size=batch_size,
        global_batch=None if batched else global_batch,
        seed=mix_seed(seed, rank),
        key=key,
        keys=keys,
        persistent_workers=conf.persistent_workers and conf.num_workers > 0,
        **dataloader_options(vars(conf), device),
    )


def _length(dataset: Dataset[Any], key: str) -> int:
    """Return the number of samples, or refuse a data set without any or without a length."""
    if isinstance(dataset, IterableDataset):
        raise UserError(
            f"{type(dataset).__name__} is an IterableDataset, whose length and order are unknown",
            key=key,
            remedy="Use a data set with __len__ and __getitem__, so that an epoch can be counted and resumed.",
        )
    samples = len(dataset)  # type: ignore[arg-type]  # torch leaves __len__ out of Dataset; a map-style one has it
    if samples == 0:
        raise UserError("the data set is empty", key=key, remedy="Check its path and its split.")
    return samples


def _check_split(draws: Any, world_size: int, key: str) -> None:
    """Refuse a sampler that splits an epoch for another number of processes."""
    if draws.num_replicas != world_size:
        raise UserError(
            f"{type(draws).__name__} splits an epoch for {draws.num_replicas} processes, and there are {world_size}",
            key=key,
            remedy="Set _partial_: true and leave num_replicas and rank out: they are then given to the class.",
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
