"""Orders that a sampler draws: the same for the same (seed, epoch), on all ranks and in a resumed run."""

from __future__ import annotations

import functools
import operator
import zlib
from abc import ABC, abstractmethod
from array import array
from collections.abc import Iterator, Sequence, Sized
from itertools import accumulate, chain
from typing import Any

import torch

from hydraloop.data.batching import BatchRequest
from hydraloop.engine.seeding import mix_seed, seeded
from hydraloop.errors import UserError

_DRAWS = 2  # separates these seeds from those of the shuffled order and of the workers


class CustomOrder:
    """What a sampler yields in each epoch. Its draws are seeded; the run's generators are neither read nor changed.

    The seeds of torch's, NumPy's and Python's global generators follow from (seed, epoch), and so do those of the
    generators that the sampler has (`generator`). `set_epoch(epoch)` is called first, if the sampler has it.

    Args:
        sampler: yields `len(sampler)` indices, or lists of indices, in each epoch.
        batched: whether it yields lists of indices.
        seed: of the run, the same on all ranks.
    """

    def __init__(self, sampler: Any, *, batched: bool, seed: int) -> None:
        self.sampler, self.seed, self._batched = sampler, seed, batched

    def __len__(self) -> int:
        """Return the number of items in an epoch."""
        return len(self.sampler)

    def __call__(self, epoch: int) -> list[Any]:
        """Return the indices of an epoch (from 0), or its lists of indices."""
        seed = mix_seed(self.seed, epoch, _DRAWS)
        part: Any = self.sampler
        while part is not None:  # a batch sampler has a sampler
            if callable(getattr(part, "set_epoch", None)):
                part.set_epoch(epoch)
            if isinstance(getattr(part, "generator", None), torch.Generator):
                part.generator.manual_seed(seed)
            part = getattr(part, "sampler", None)
        with seeded(seed):
            drawn = list(self.sampler)
        return [[*map(operator.index, item)] if self._batched else operator.index(item) for item in drawn]


def create_sampler(sampler: Any, dataset: Any, key: str) -> Any:
    """Return the sampler of a data set; a partial is called with the data set.

    Raises:
        UserError: the sampler splits an epoch between processes, as the loader does.
    """
    if isinstance(sampler, functools.partial):
        sampler = sampler(dataset)
    if any(hasattr(part, "num_replicas") for part in (sampler, getattr(sampler, "sampler", None))):
        raise UserError(
            f"{type(sampler).__name__} splits an epoch between processes, and the loader splits it again",
            key=key,
            remedy="Leave it out: by default, an epoch is shuffled by the seed, and each process has its part.",
        )
    return sampler


class EpochOrder(ABC):
    """Yields the requests of this rank's batches in an epoch. The number of batches is the same on all ranks."""

    epoch: int | None = None
    """Of the next iteration, from 0; None stands for 0."""
    first = 0
    """The batch at which the next iteration begins."""
    batch_size: int | None = None
    """Samples of a full batch of this rank. None: batches are drawn and have any size."""
    _kept: tuple[int, Sequence[int]] = -1, ()
    """An epoch, and what `_draw` returned for it."""

    def __iter__(self) -> Iterator[BatchRequest]:
        epoch = self.epoch
        return (self.request(batch_idx, epoch) for batch_idx in range(self.first, len(self)))

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches in an epoch."""

    def request(self, batch_idx: int, epoch: int | None) -> BatchRequest:
        """Return the request of a batch, or of a filler. The order of one epoch is kept; another one takes time.

        Args:
            batch_idx: number of the batch in the epoch, from 0.
            epoch: from 0; None stands for 0.

        Raises:
            IndexError: an epoch has no such batch.
        """
        start, of_all, begin, mine = self._part(batch_idx, epoch or 0)
        order = self._order_of(epoch or 0)
        if mine:
            return BatchRequest(list(order[begin : begin + mine]), epoch, batch_idx)
        of_others = list(order[start : start + min(2, of_all)])
        # Two samples, because batch norm fails on one in training. One, if no batch of a rank has more.
        return BatchRequest((of_others * 2)[: min(2, self.batch_size or 2)], epoch, batch_idx)

    def samples_at(self, batch_idx: int) -> tuple[int, int]:
        """Return the number of samples that count in a batch, as (on this rank, on all ranks); (0, n) for a filler.

        Args:
            batch_idx: number of the batch in the epoch, from 0.

        Raises:
            IndexError: an epoch has no such batch.
        """
        _, of_all, _, mine = self._part(batch_idx, self.epoch or 0)
        return mine, of_all

    def checksum(self, epoch: int) -> int:
        """Return a number that differs if an epoch has other samples or another order; of at most 16 samples."""
        order = self._order_of(epoch)
        return zlib.crc32(str([len(order), *order[:: -(-len(order) // 16)]]).encode())

    @abstractmethod
    def _part(self, batch_idx: int, epoch: int) -> tuple[int, int, int, int]:
        """Return where a global batch starts in the epoch, its samples, where this rank's part begins, its samples."""

    @abstractmethod
    def _draw(self, epoch: int) -> Sequence[int]:
        """Return the samples of an epoch, of all ranks."""

    def _order_of(self, epoch: int) -> Sequence[int]:
        if self._kept[0] != epoch:
            self._kept = epoch, self._draw(epoch)
        return self._kept[1]


class EpochSampler(EpochOrder):
    """The order of a data set: all samples once, shuffled by (seed, epoch) or in the order of the data set.

    The global random state is neither read nor changed, so a resumed run has the same order as one without a stop.

    All ranks compute the same order, and each has its part. Global batch g is `order[g * G : (g + 1) * G]`. G is the
    batch size times the number of ranks, W. If the last global batch has only n samples, each rank has n // W of them,
    and the first n % W ranks have one more. So the batches of all ranks, joined in rank order, are those of one process
    with batches of G samples.

    A rank without a share in a global batch has a filler that does not count (see `samples_at`): the first two samples
    of that batch, or its only one twice, or one sample if no rank has two.

    A position takes no time to reach: the order of an epoch is computed once, and each request takes its part of it.

    Args:
        data: anything with a length.
        shuffle: compute a new order for each epoch; False: 0, 1, 2, ...
        seed: the run's seed, 0 or more; the same on all ranks.
        batch_size: samples of a batch of this rank, 1 or more.
        drop_last: drop an incomplete last global batch, on all ranks.
        rank: this process's number, 0 .. world_size - 1.
        world_size: number of processes that share the samples (W).
        order: the order of each epoch instead of `data` and `shuffle`; its indices may repeat or be left out.

    """

    batch_size: int

    def __init__(
        self,
        data: Sized,
        *,
        shuffle: bool,
        seed: int = 0,
        batch_size: int = 1,
        drop_last: bool = False,
        rank: int = 0,
        world_size: int = 1,
        order: CustomOrder | None = None,
    ) -> None:
        self.shuffle, self.seed, self.batch_size = shuffle, seed, batch_size
        self.global_batch = batch_size * world_size
        self.rank, self.world_size = rank, world_size
        self._custom = order
        self.samples = len(data if order is None else order)
        self._full = self.samples // self.global_batch
        self._batches = self._full if drop_last else -(-self.samples // self.global_batch)
        self._samples_of_full = batch_size, self.global_batch

    def check_size(self, key: str) -> None:
        """Refuse an order that leaves a rank without samples, for which metrics of torchmetrics fail.

        Args:
            key: of the data set in the config.
        """
        samples, ranks = self.samples, self.world_size
        if samples < ranks:
            raise UserError(
                f"{samples} samples cannot be shared by {ranks} processes",
                key=key,
                remedy=f"Use at most {samples} processes, or more data.",
            )
        if self._batches == 0:
            raise UserError(
                f"{samples} samples are less than a batch of {self.global_batch}, and drop_last drops the incomplete "
                "batch",
                key=key,
                remedy=f"Use data.loader.batch_size={samples // ranks} or less, or data.loader.drop_last=false.",
            )

    def __len__(self) -> int:
        return self._batches

    def samples_at(self, batch_idx: int) -> tuple[int, int]:
        """See `EpochOrder`. Called in each iteration; 0.1 µs for a full batch."""
        if 0 <= batch_idx < self._full:
            return self._samples_of_full
        return super().samples_at(batch_idx)

    def _part(self, batch_idx: int, epoch: int) -> tuple[int, int, int, int]:
        """See `EpochOrder`."""
        if not 0 <= batch_idx < self._batches:
            raise IndexError(f"an epoch has no batch {batch_idx}")
        start = batch_idx * self.global_batch
        of_all = min(self.global_batch, self.samples - start)
        each, more = divmod(of_all, self.world_size)
        begin = start + self.rank * each + min(self.rank, more)
        return start, of_all, begin, each + (self.rank < more)

    def _draw(self, epoch: int) -> Sequence[int]:
        """See `EpochOrder`."""
        if self._custom is not None:
            return array("q", self._custom(epoch))
        if not self.shuffle:
            return range(self.samples)
        generator = torch.Generator().manual_seed(mix_seed(self.seed, epoch))
        shuffled: Any = torch.randperm(self.samples, generator=generator).numpy()
        order = array("q")  # 8 bytes a sample; a list takes 40
        order.frombytes(memoryview(shuffled).cast("B"))
        return order


class EpochBatchSampler(EpochOrder):
    """The order of a batch sampler, which draws the batches of all ranks.

    Each rank has one batch of a global batch. A rank without one in the last global batch has a filler that does not
    count: the first two samples of the global batch, or its only one twice.

    Args:
        order: the batches of each epoch.
        rank: this process's number, 0 .. world_size - 1.
        world_size: number of processes that share the batches.
    """

    def __init__(self, order: CustomOrder, *, rank: int = 0, world_size: int = 1) -> None:
        self.rank, self.world_size = rank, world_size
        self._custom = order

    def __len__(self) -> int:
        return -(-len(self._custom) // self.world_size)

    def _part(self, batch_idx: int, epoch: int) -> tuple[int, int, int, int]:
        """See `EpochOrder`."""
        if not 0 <= batch_idx < len(self):
            raise IndexError(f"an epoch has no batch {batch_idx}")
        self._order_of(epoch)  # sets `_starts`
        bounds = self._starts[batch_idx * self.world_size : (batch_idx + 1) * self.world_size + 1]
        begin, end = (bounds[min(number, len(bounds) - 1)] for number in (self.rank, self.rank + 1))
        return bounds[0], bounds[-1] - bounds[0], begin, end - begin

    def _draw(self, epoch: int) -> Sequence[int]:
        """See `EpochOrder`."""
        batches = self._custom(epoch)
        self._starts = [0, *accumulate(map(len, batches))]  # of the batches in the kept epoch, and its end
        return array("q", chain.from_iterable(batches))
