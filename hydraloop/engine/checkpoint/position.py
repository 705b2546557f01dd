"""The position of a run in its training data: saved, checked, and given back to the train loader."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from hydraloop.errors import UserError

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)


def of(engine: Engine) -> dict[str, Any] | None:
    """Return the state of the train loader; None if its position follows from the progress."""
    loader, progress = engine.train_loader, engine.progress
    return None if loader is None else loader.state_at(progress.batch_in_epoch, progress.iteration)


def global_batch_size(engine: Engine) -> int | None:
    """Return the samples of all ranks in a full batch; None if the loader has no `batch_size` (a list)."""
    batch_size = getattr(engine.loaders.train, "batch_size", None)
    return None if batch_size is None else batch_size * engine.distributed.world_size


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
    if batch and batch_size is not None and batch_size != global_batch_size(engine):
        size, rest = divmod(batch_size, engine.distributed.world_size)
        raise UserError(
            f"the checkpoint is inside an epoch of batches of {batch_size} samples (of all ranks), and they have "
            f"{global_batch_size(engine)} now",
            key=key,
            remedy=f"Use {'a number of ranks that divides them' if rest else f'{key}={size}'}, {or_end}",
        )
    if batch and epoch_length != engine.epoch_length:
        raise UserError(
            f"the checkpoint is inside an epoch (at {batch} of {epoch_length} batches), and an epoch has "
            f"{engine.epoch_length} now",
            key=key,
            remedy=f"Use the data and the batch size of the run, {or_end}",
        )


def load(engine: Engine, states: list[dict[str, Any] | None] | None, strict: bool) -> None:
    """Let the train loader continue at the saved position.

    Args:
        states: of the train loader on each rank of the saved run; None: none of them had one.
    """
    if engine.train_loader is None:
        return
    state = None if states is None else states[engine.distributed.rank % len(states)]
    try:
        engine.train_loader.load_state(state, engine.progress.batch_in_epoch, engine.progress.iteration)
    except UserError as error:
        if strict:
            raise
        log.warning(
            "%s: %s; the batches differ from those of the saved run (resume_strict=false)", error.key, error.problem
        )
