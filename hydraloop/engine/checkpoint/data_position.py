"""The position of a run in its training data: saved, checked, and given back to the train loader."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Mapping, Sequence, Sized
from typing import Any

from hydraloop.engine.batches import Batches
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import Ordered, share_of
from hydraloop.engine.progress import Progress
from hydraloop.errors import UserError

log = logging.getLogger(__name__)


class DataPosition:
    """Saves and restores the position in the training data.

    Args:
        batches: with the train loader.
        progress: of the run.
        ranks: the ranks.
        seed: of the run.
    """

    def __init__(self, batches: Batches, progress: Progress, ranks: Distributed, seed: int) -> None:
        self._batches, self._progress, self._ranks, self._seed = batches, progress, ranks, seed

    def state(self) -> dict[str, Any] | None:
        """Return the state of the train loader; None if its position follows from the progress."""
        loader, progress = self._batches.train_loader, self._progress
        return None if loader is None else loader.state_at(progress.batch_in_epoch, progress.iteration)

    def meta(self) -> dict[str, Any]:
        """Return the entries of `meta` about the data; see `format.py`."""
        return {
            "seed": self._seed,
            "epoch_length": self._progress.epoch_length,
            "batch_size": self._global_batch(),
            "batches": getattr(getattr(self._batches.loaders.train, "order", None), "batches", None),
            "order": self._order(),
            "ranks": self._ranks.world_size,
            "ranks_per_node": self._ranks.local_world_size,
        }

    def load(self, meta: Mapping[str, Any], states: Sequence[dict[str, Any] | None] | None, *, strict: bool) -> None:
        """Let the train loader continue at the position, which the progress already has.

        Args:
            meta: that of the checkpoint.
            states: of the train loader on each rank of the saved run; None: no rank had one.
            strict: False: if the same batches are not possible, warn and continue with others.

        Raises:
            UserError: the position is inside an epoch, and the seed, the size of batches or the length of epochs has
                changed; with `strict`, also if the order has.
        """
        if self._progress.batch_in_epoch:
            self._check(meta)
        if self._ranks.is_main and meta.get("ranks", self._ranks.world_size) != self._ranks.world_size:
            self._log_shares(meta)
        loader = self._batches.train_loader
        if loader is None:
            return
        state = None if states is None else states[self._ranks.rank % len(states)]
        try:
            if "order" in meta and meta["order"] != self._ranks.from_main(self._order()):
                raise UserError(
                    "the checkpoint is inside an epoch whose samples had another order, so some would be left out and "
                    "others repeated",
                    key="data.train",
                    remedy="Use the data and the sampler of the run, or a checkpoint from the end of an "
                    "epoch. With resume_strict=false, it continues in the new order.",
                )
            loader.load_state(state, self._progress.batch_in_epoch, self._progress.iteration)
        except UserError as error:
            if strict:
                raise
            text = "%s: %s; the batches differ from those of the saved run (resume_strict=false)"
            log.warning(text, error.key, error.problem)

    def _global_batch(self) -> int | None:
        """Return the samples of all ranks in a batch; None if it is not known."""
        loader = self._batches.loaders.train
        each = getattr(loader, "batch_size", None)
        return getattr(loader, "global_batch", None) or (None if each is None else each * self._ranks.world_size)

    def _order(self) -> int | None:
        """Return a number that differs if the order of this epoch does; None if it is unknown, or between two epochs.

        It is a checksum of the first samples of some global batches, on rank 0, which are the same for any number of
        ranks; for a DataLoader, the number of samples.
        """
        loader, progress = self._batches.loaders.train, self._progress
        if loader is None or not progress.batch_in_epoch:
            return None
        if isinstance(loader, Ordered):
            batches = range(0, len(loader), -(-len(loader) // 16))
            return zlib.crc32(str([loader.indices_at(batch, progress.epoch)[0] for batch in batches]).encode())
        sampler = getattr(loader, "sampler", None)
        return len(sampler) if isinstance(sampler, Sized) else None

    def _check(self, meta: Mapping[str, Any]) -> None:
        """Refuse a position inside an epoch if the seed, the size of batches or the length of epochs has changed."""
        key, or_end = "data.loader.batch_size", "or a checkpoint from the end of an epoch."
        seed, length, now = meta.get("seed", self._seed), self._progress.epoch_length, self._global_batch()
        if seed != self._seed:
            raise UserError(
                f"the checkpoint is inside an epoch, whose order follows from seed {seed}",
                key="seed",
                remedy=f"Use seed={seed}, {or_end}",
            )
        batch_size = meta.get("batch_size")
        if batch_size is not None and batch_size != now:
            of_rank, rest = meta.get("batch_size_per_rank"), 0
            if of_rank is None or share_of(self._batches.loaders.train) is None:
                of_rank, rest = divmod(batch_size, self._ranks.world_size)
            raise UserError(
                f"the checkpoint is inside an epoch of batches of {batch_size} samples (of all ranks), and they have "
                f"{now} now",
                key=key,
                remedy=f"Use {'a number of ranks that divides them' if rest else f'{key}={of_rank}'}, {or_end}",
            )
        if meta.get("epoch_length") != length:
            raise UserError(
                f"the checkpoint is inside an epoch (at {self._progress.batch_in_epoch} of {meta.get('epoch_length')} "
                f"batches), and an epoch has {length} now",
                key=key,
                remedy=f"Use the data and the batch size of the run, {or_end}",
            )

    def _log_shares(self, meta: Mapping[str, Any]) -> None:
        """Log how another number of ranks shares the global batch, and what differs."""
        loader, ranks = self._batches.loaders.train, self._ranks.world_size
        size = getattr(loader, "global_batch", None)
        if size is not None and size == meta.get("batch_size"):
            shares = [size // ranks + (rank < size % ranks) for rank in range(ranks)]
            found = " and ".join(f"{share} on {shares.count(share)}" for share in sorted({*shares}, reverse=True))
            log.info("the global batch stays %d samples: %s of %d ranks", size, found, ranks)
