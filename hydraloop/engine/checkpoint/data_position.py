"""The position of a run in its training data: saved, checked, and given back to the train loader."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

from hydraloop.engine.batches import Batches
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.loaders import share_of
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
        self._batches = batches
        self._progress = progress
        self._ranks = ranks
        self._seed = seed

    def state(self) -> dict[str, Any] | None:
        """Return the state of the train loader; None if its position follows from the progress."""
        loader = self._batches.train_loader
        return None if loader is None else loader.state_at(self._progress.batch_in_epoch, self._progress.iteration)

    def meta(self) -> dict[str, Any]:
        """Return the entries of `meta` about the data; see `format.py`."""
        return {
            "seed": self._seed,
            "epoch_length": self._progress.epoch_length,
            "batch_size": _global_batch(self._batches.loaders.train, self._ranks),
            "order": self._order(),
            "ranks": self._ranks.world_size,
            "ranks_per_node": self._ranks.local_world_size,
        }

    def load(self, meta: Mapping[str, Any], states: Sequence[dict[str, Any] | None] | None, *, strict: bool) -> None:
        """Let the train loader continue at the position, which the progress already has.

        If a global batch has another size than in the saved run, the position is moved, and rank 0 logs it.

        Args:
            meta: that of the checkpoint.
            states: of the train loader on each rank of the saved run; None: no rank had one.
            strict: False: if the same batches are not possible, warn and continue with others.

        Raises:
            UserError: with `strict`, the position is inside an epoch, and its order or length has changed.
        """
        loader = self._batches.train_loader
        if loader is None:
            return
        progress = self._progress
        ranks = self._ranks
        saved, now, unit = _sizes(meta, self._batches.loaders.train, ranks)
        is_inside = progress.batch_in_epoch > 0
        has_changed = is_inside and self._has_changed(meta, same_batches=saved == now)
        move_position(progress, meta, self._batches.loaders.train, ranks, progress.epoch_length)
        if saved != now and ranks.is_main:
            text = f"a global batch has {now} {unit}, and had {saved} in the checkpoint"
            at = f": the epoch continues at batch {progress.batch_in_epoch + 1}, and at most one batch is repeated"
            log.info("%s", text + at if is_inside else text)
        state = None if states is None else states[ranks.rank % len(states)]
        try:
            if has_changed:
                raise UserError(
                    f"the checkpoint is inside an epoch of {meta.get('epoch_length')} batches with the seed "
                    f"{meta.get('seed')}, whose samples had another order: some would be left out and others repeated",
                    key="data.train",
                    remedy="Use the data, the sampler and the seed of the run, or a checkpoint from the end of an "
                    "epoch. With resume_strict=false, it continues in the new order.",
                )
            loader.load_state(state, progress.batch_in_epoch, progress.iteration)
        except UserError as error:
            if strict:
                raise
            text = "%s: %s; the batches differ from those of the saved run (resume_strict=false)"
            log.warning(text, error.key, error.problem)

    def _has_changed(self, meta: Mapping[str, Any], *, same_batches: bool) -> bool:
        """Return whether the epoch has another order or length than in the saved run; called on every rank."""
        if meta.get("seed", self._seed) != self._seed:
            return True
        if same_batches and meta.get("epoch_length") != self._progress.epoch_length:
            return True
        of_all_ranks = share_of(self._batches.loaders.train) is not None  # the order is that of any number of ranks
        is_comparable = of_all_ranks or meta.get("ranks", self._ranks.world_size) == self._ranks.world_size
        return is_comparable and "order" in meta and meta["order"] != self._ranks.from_main(self._order())

    def _order(self) -> int | None:
        """Return a number that differs if the order of this epoch does; None if it is unknown, or between two epochs.

        It is a checksum of some samples; for a DataLoader, the number of samples.
        """
        loader = self._batches.loaders.train
        if loader is None or not self._progress.batch_in_epoch:
            return None
        checksum: Callable[[int], int] | None = getattr(loader, "order_checksum", None)
        if checksum is not None:
            return checksum(self._progress.epoch)
        sampler = getattr(loader, "sampler", None)
        return len(sampler) if isinstance(sampler, Sized) else None


def move_position(
    progress: Progress, meta: Mapping[str, Any], loader: object, ranks: Distributed, epoch_length: int
) -> None:
    """Count the position in the epoch in global batches of their size now; at most one of them is repeated.

    Args:
        progress: that of the checkpoint.
        meta: that of the checkpoint.
        loader: for training.
        ranks: the ranks.
        epoch_length: batches of an epoch now.
    """
    saved, now, _ = _sizes(meta, loader, ranks)
    progress.batch_in_epoch = min(progress.batch_in_epoch * saved // now, epoch_length)


def _sizes(meta: Mapping[str, Any], loader: object, ranks: Distributed) -> tuple[int, int, str]:
    """Return the size of a global batch in the checkpoint, its size now, and their unit."""
    saved, now = meta.get("batch_size"), _global_batch(loader, ranks)
    if saved is None or now is None:  # batches may have any size
        return meta.get("ranks", ranks.world_size), ranks.world_size, "batches of ranks"
    return saved, now, "samples"


def _global_batch(loader: object, ranks: Distributed) -> int | None:
    """Return the samples of all ranks in a batch; None if it is not known."""
    each: int | None = getattr(loader, "batch_size", None)
    return None if each is None else each * ranks.world_size
