"""A loader of a map-style data set. It can start inside an epoch, and does not use the global random state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Dataset, Subset

from hydraloop.data.batching import Collate, CollateError, SeededFetcher, as_is, dataloader_options
from hydraloop.data.in_memory import InMemoryDataset
from hydraloop.data.sampler import CustomOrder, EpochBatchSampler, EpochOrder, EpochSampler, create_sampler
from hydraloop.engine.loaders import end_now, end_workers
from hydraloop.engine.seeding import mix_seed
from hydraloop.engine.signals import ended_at_exit
from hydraloop.errors import UserError
from hydraloop.schemas.data import LoaderConf

_WORKERS = 1  # separates the seeds of the workers from that of the order


class GlobalBatchLoader:
    """The batches of a data set. Their order follows from (seed, epoch), their draws also from the batch and the rank.

    Each rank has a part of each global batch. `len(loader)` is the number of batches in a whole epoch, the same on all
    ranks. Created by `build_loader`.

    Args:
        seeded: the data set, with its `Collate`.
        order: of this rank's batches.
        key: of the data set in the config, for errors.
        keys: of the options in the config, for errors.
        options: of torch's DataLoader.
    """

    calls_set_epoch = True
    """The data set gets the epoch in the processes that load it."""

    def __init__(
        self, seeded: SeededFetcher, order: EpochOrder, *, key: str, keys: Mapping[str, str], **options: Any
    ) -> None:
        self.dataset, self.seeded, self.order, self.key, self.keys = seeded.dataset, seeded, order, key, keys
        self.batch_size = order.batch_size
        self.num_workers: int = options["num_workers"]
        self._generator = torch.Generator()
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
        """Return the batches of the epoch from index `first` on, without loading the others; see `TrainLoader`.

        Raises:
            UserError: `collate_fn` has failed.
            Exception: of the data set, with a note of the samples.
        """
        self.order.first = first
        # torch draws the workers' base seed from this generator, and worker i seeds torch, random and numpy with
        # base + i. Only `worker_init_fn` draws from them. Persistent workers are seeded when they start.
        self._generator.manual_seed(mix_seed(self.seeded.seed, self.epoch, _WORKERS))
        here = not (self.num_workers or self._torch.pin_memory)  # torch's iterator would take 15 µs a batch more
        return self._explained(map(self.seeded.__getitems__, self.order) if here else ended_at_exit(self._torch))

    def state_at(self, first: int, iteration: int) -> dict[str, Any] | None:
        """Return None: the order follows from (seed, epoch); see `TrainLoader`."""
        return None

    def load_state(self, state: dict[str, Any] | None, first: int, iteration: int) -> None:
        """Do nothing; see `TrainLoader`."""

    def end_workers(self) -> None:
        """End the workers; the next iteration starts new ones with copies of the current data set."""
        end_workers(self._torch)

    @property
    def has_exact_sizes(self) -> bool:
        """Whether each batch has as many samples as the sampler has drawn.

        A `collate_fn` of the user, and a data set that returns whole batches, may drop, merge or repeat samples.
        """
        data: Any = self.dataset
        while type(data) is Subset:
            data = data.dataset
        returns_batches = getattr(data, "__getitems__", None) is not None and type(data) is not InMemoryDataset
        return not (self.collate_fn.given or returns_batches)

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

    @property
    def epoch(self) -> int:
        """The epoch (from 0) of the current or next iteration."""
        return self.order.epoch or 0

    def indices_at(self, batch_idx: int, epoch: int) -> list[int]:
        """Return the indices of this rank's samples in a batch, or of its filler; see `EpochOrder.request`."""
        return self.order.request(batch_idx, epoch).indices

    def order_checksum(self, epoch: int) -> int:
        """Return a number that differs if an epoch has other samples or another order."""
        return self.order.checksum(epoch)

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Any]:
        return self.begin(0, 0)

    def _explained(self, batches: Iterable[Any]) -> Iterator[Any]:
        try:
            yield from batches
        except CollateError as error:
            raise self.collate_fn.mistake(error) from error
        finally:
            if not self._torch.persistent_workers:  # a traceback has torch's frames, which would keep the workers
                end_now(batches)


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
    **options: Any,
) -> GlobalBatchLoader:
    """Return a loader over a data set, or over this rank's part of it (see `EpochSampler`).

    Args:
        dataset: must have a length. Its `__getitems__`, if it has one, may return a stacked batch.
        shuffle: use a new order in each epoch, for training.
        seed: the run's seed, 0 or more; the same on all ranks.
        device: to which the batches will be copied.
        key: of the data set in the config (`data.train`), for errors.
        keys: of the options in the config, for errors; None: `data.loader.<option>`.
        rank, world_size: this process's number, from 0, and the number of processes that share the samples.
        options: see `LoaderConf`, with objects instead of nodes. `sampler` and `batch_sampler` yield what is in an
            epoch of all ranks; a `functools.partial` is called with the data set.

    Raises:
        UserError: the data set is empty, has fewer samples than ranks or than one global batch (with `drop_last`), or
            an option is refused.
    """
    conf = LoaderConf(**options)
    keys = keys or {name: f"data.loader.{name}" for name in vars(conf)}
    if conf.sampler is not None and conf.batch_sampler is not None:
        problem = "there is a batch_sampler too, which defines the order"
        raise UserError(problem, key=keys["sampler"], remedy="Leave one of the two out.")
    samples = len(dataset)  # type: ignore[arg-type]  # torch leaves __len__ out of Dataset; a map-style one has it
    if samples == 0:
        raise UserError("the data set is empty", key=key, remedy="Check its path and its split.")
    which = "sampler" if conf.batch_sampler is None else "batch_sampler"
    sampler = create_sampler(getattr(conf, which), dataset, keys[which])
    order: EpochOrder
    if conf.batch_sampler is not None:
        order = EpochBatchSampler(CustomOrder(sampler, batched=True, seed=seed), rank=rank, world_size=world_size)
    else:
        order = EpochSampler(
            range(samples),
            shuffle=shuffle,
            seed=seed,
            batch_size=conf.batch_size,
            drop_last=conf.drop_last,
            rank=rank,
            world_size=world_size,
            order=None if sampler is None else CustomOrder(sampler, batched=False, seed=seed),
        )
        order.check_size(key)
    seeded = SeededFetcher(dataset, Collate(conf.collate_fn, keys["collate_fn"], key), mix_seed(seed, rank))
    of_torch = dataloader_options(vars(conf), device)
    of_torch["persistent_workers"] = conf.persistent_workers and conf.num_workers > 0
    return GlobalBatchLoader(seeded, order, key=key, keys=keys, **of_torch)
