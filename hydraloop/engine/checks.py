"""What the engine refuses to train or to evaluate on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydraloop.engine.hook import Hook
from hydraloop.engine.inputs import Loader
from hydraloop.errors import UserError

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


def check_trainable(engine: Engine) -> None:
    """Refuse to train on nothing.

    Raises:
        UserError: there is no train loader, or it has no batch.
    """
    if engine.loaders.train is None:
        raise UserError("there is no training data", key="data.train", remedy="Try data=digits.")
    lengths = check_lengths(engine)
    if not all(lengths):
        raise UserError(
            "the train loader has no batch",
            key="data.loader.batch_size",
            remedy="Use a batch size up to the size of the data set, or data.loader.drop_last=false.",
        )


def check_lengths(engine: Engine) -> list[int]:
    """Refuse loaders with which some ranks would wait for ever for others. Returns the ranks' train batches.

    In evaluation the ranks wait for each other only where each has a shard of the model.

    Raises:
        UserError: says how many batches each rank has.
    """
    loaders = engine.loaders
    mine = {
        name: len(loader or ())
        for name, loader in zip(_SPLITS, (loaders.train, loaders.val, loaders.test), strict=True)
    }
    told: list[dict[str, int]] = engine.distributed.gather(mine)
    for name in _SPLITS if engine.distributed.sharded else _SPLITS[:1]:
        lengths = [one[name] for one in told]
        if len(set(lengths)) > 1:
            raise UserError(
                f"the ranks have unequal numbers of batches in an epoch: {', '.join(map(str, lengths))}; those with "
                "more would wait for the others for ever",
                key=f"data.{name}",
                remedy="Give each rank as many, as hydraloop's own loader does.",
            )
    return [one["train"] for one in told]


_SPLITS = ("train", "val", "test")


def check_evaluable(loader: Loader | None, key: str) -> None:
    """Refuse to evaluate on nothing.

    Raises:
        UserError: there is no loader.
    """
    if loader is None:
        raise UserError("there is no such data", key=key, remedy=f"Give {key} a data set.")


def check_epoch(engine: Engine) -> None:
    """Refuse a loader that yields more or fewer batches than its length: no window would close where it should.

    Raises:
        UserError: says how many.
    """
    progress, length = engine.progress, engine.epoch_length
    cut_short = progress.iteration >= engine.max_iters or engine.stopping
    if progress.batch_in_epoch == length or (progress.batch_in_epoch < length and cut_short):
        return
    got = "more" if progress.batch_in_epoch > length else progress.batch_in_epoch
    raise UserError(
        f"the loader has a length of {length} batches and yielded {got}",
        key="data.train",
        remedy="Let __len__ of the data set (or loader) be what it yields.",
    )


def check_hook(hook: object, key: str) -> None:
    """Refuse an object that is no hook.

    Raises:
        UserError: names its class.
    """
    if not isinstance(hook, Hook):
        raise UserError(
            f"{type(hook).__name__} is no Hook",
            key=key,
            remedy="Inherit from hydraloop.Hook; hydraloop.compat has adapters for hooks of MMEngine and Lightning.",
        )
