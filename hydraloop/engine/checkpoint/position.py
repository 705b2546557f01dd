"""The position of a run in its training data: saved, checked, and given back to the train loader."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sized
from typing import TYPE_CHECKING, Any

from hydraloop.engine.loaders import Ordered, share_of
from hydraloop.errors import UserError

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)


def of(engine: Engine) -> dict[str, Any] | None:
    """Return the state of the train loader; None if its position follows from the progress."""
    loader, progress = engine.train_loader, engine.progress
    return None if loader is None else loader.state_at(progress.batch_in_epoch, progress.iteration)


def sizes(engine: Engine) -> dict[str, int | None]:
    """Return the entries of `meta` about global batches; see `format.py`."""
    loader, ranks = engine.loaders.train, engine.distributed.world_size
    each = getattr(loader, "batch_size", None)
    size = getattr(loader, "global_batch", None) or (None if each is None else each * ranks)
    return {"batch_size": size, "batches": getattr(getattr(loader, "order", None), "batches", None)}


def order(engine: Engine) -> int | None:
    """Return a number that differs if the order of this epoch does; None if it is unknown, or between two epochs.

    It is a checksum of the first samples of some global batches, on rank 0, which are the same for any number of ranks;
    for a DataLoader, the number of samples.
    """
    loader, progress = engine.loaders.train, engine.progress
    if loader is None or not progress.batch_in_epoch:
        return None
    if isinstance(loader, Ordered):
        batches = range(0, len(loader), -(-len(loader) // 16))
        return zlib.crc32(str([loader.indices_at(batch, progress.epoch)[0] for batch in batches]).encode())
    sampler = getattr(loader, "sampler", None)
    return len(sampler) if isinstance(sampler, Sized) else None


def check(engine: Engine, meta: dict[str, Any]) -> None:
    """Refuse a position inside an epoch if the seed, the size of batches or the length of epochs has changed."""
    batch, epoch_length, batch_size = engine.progress.batch_in_epoch, meta.get("epoch_length"), meta.get("batch_size")
    key, or_end = "data.loader.batch_size", "or a checkpoint from the end of an epoch."
    seed = meta.get("seed", engine.seed)
    if batch and seed != engine.seed:
        raise UserError(
            f"the checkpoint is inside an epoch, whose order follows from seed {seed}",
            key="seed",
            remedy=f"Use seed={seed}, {or_end}",
        )
    now, ranks = sizes(engine)["batch_size"], engine.distributed.world_size
    if batch and batch_size is not None and batch_size != now:
        of_rank, rest = meta.get("batch_size_per_rank"), 0
        if of_rank is None or share_of(engine.loaders.train) is None:
            of_rank, rest = divmod(batch_size, ranks)
        raise UserError(
            f"the checkpoint is inside an epoch of batches of {batch_size} samples (of all ranks), and they have "
            f"{now} now",
            key=key,
            remedy=f"Use {'a number of ranks that divides them' if rest else f'{key}={of_rank}'}, {or_end}",
        )
    if batch and epoch_length != engine.epoch_length:
        raise UserError(
            f"the checkpoint is inside an epoch (at {batch} of {epoch_length} batches), and an epoch has "
            f"{engine.epoch_length} now",
            key=key,
            remedy=f"Use the data and the batch size of the run, {or_end}",
        )
    if engine.distributed.is_main and meta.get("ranks", ranks) != ranks:
        _tell(engine, meta)


def _tell(engine: Engine, meta: dict[str, Any]) -> None:
    """Log how another number of ranks shares the global batch, and what differs."""
    loader, ranks = engine.loaders.train, engine.distributed.world_size
    size = getattr(loader, "global_batch", None)
    if size is not None and size == meta.get("batch_size"):
        shares = [size // ranks + (rank < size % ranks) for rank in range(ranks)]
        found = " and ".join(f"{share} on {shares.count(share)}" for share in sorted({*shares}, reverse=True))
        log.info("the global batch stays %d samples: %s of %d ranks", size, found, ranks)
    seeded = getattr(loader, "seeded", None)
    if seeded is not None and seeded.by_batch and seeded.may_draw:
        text = "data.train: %s draws by batch, so its augmentation differs from that of %d ranks"
        log.warning(text, type(seeded.dataset).__name__, meta["ranks"])


def load(engine: Engine, meta: dict[str, Any], states: list[dict[str, Any] | None] | None, strict: bool) -> None:
    """Let the train loader continue at the saved position.

    Args:
        meta: that of the checkpoint.
        states: of the train loader on each rank of the saved run; None: none of them had one.
    """
    if engine.train_loader is None:
        return
    state = None if states is None else states[engine.distributed.rank % len(states)]
    try:
        if "order" in meta and meta["order"] != engine.distributed.from_main(order(engine)):
            raise UserError(
                "the checkpoint is inside an epoch whose samples had another order, so some would be left out and "
                "others repeated",
                key="data.train",
                remedy="Use the data, the sampler and data.weights of the run, or a checkpoint from the end of an "
                "epoch. With resume_strict=false, it continues in the new order.",
            )
        engine.train_loader.load_state(state, engine.progress.batch_in_epoch, engine.progress.iteration)
    except UserError as error:
        if strict:
            raise
        log.warning(
            "%s: %s; the batches differ from those of the saved run (resume_strict=false)", error.key, error.problem
        )
