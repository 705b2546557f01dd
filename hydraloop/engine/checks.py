"""What the engine refuses to train or to evaluate with. Each check raises a `UserError`."""

from __future__ import annotations

import inspect
import logging
import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hydraloop.engine.hook import GENERAL_POINTS, MOUNT_POINTS, Hook
from hydraloop.engine.hook_order import overrides
from hydraloop.engine.loaders import Loader
from hydraloop.engine.ready_loader import check_ranks
from hydraloop.errors import UserError

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)


def check_trainable(engine: Engine) -> None:
    """Refuse to train without a train loader, or with one that has no batch."""
    if engine.loaders.train is None:
        raise UserError(
            "there is no training data", key="data.train", remedy="Try data=digits, or in Python loaders={'train': …}."
        )
    check_ranks(engine.loaders.train, engine.distributed.world_size)
    if not all(check_lengths(engine)):
        raise UserError(
            "the train loader has no batch",
            key="data.loader.batch_size",
            remedy="Use a batch size up to the size of the data set, or data.loader.drop_last=false.",
        )


def check_lengths(engine: Engine) -> list[int]:
    """Refuse loaders of different lengths, with which some ranks would wait forever for others.

    In evaluation, ranks wait for each other only if the model is sharded.

    Returns:
        The number of train batches on each rank.
    """
    mine = {"train": 0, **{key: len(loader) for key, loader in engine.loaders.by_key().items()}}
    gathered: list[dict[str, int]] = engine.distributed.gather(mine)
    for split in mine if engine.distributed.sharded else ("train",):
        lengths = [one.get(split, 0) for one in gathered]
        if len(set(lengths)) > 1:
            raise UserError(
                f"the ranks have different numbers of batches in an epoch: {', '.join(map(str, lengths))}; those with "
                "more would wait for the others forever",
                key=f"data.{split.replace('/', '.')}",
                remedy="Give each rank the same number of batches, as hydraloop's loader does.",
            )
    return [one["train"] for one in gathered]


def check_evaluable(loader: Loader | Mapping[str, Loader] | None, key: str) -> None:
    """Refuse to evaluate without a loader; `key` names its option."""
    if loader is None:
        split = key.removeprefix("data.")
        remedy = f"Give {key} a data set. For the engine of a finished run: hydraloop.load(…, splits=['{split}'])."
        raise UserError("there is no data set", key=key, remedy=remedy)


def check_epoch(engine: Engine) -> None:
    """Refuse a loader that has yielded more or fewer batches than its length, from which windows are planned."""
    progress, length = engine.progress, engine.epoch_length
    cut_short = progress.iteration >= engine.max_iters or engine.stopping
    if progress.batch_in_epoch == length or (progress.batch_in_epoch < length and cut_short):
        return
    got = "more" if progress.batch_in_epoch > length else progress.batch_in_epoch
    raise UserError(
        f"the loader has a length of {length} batches and yielded {got}",
        key="data.train",
        remedy="Let __len__ of the data set (or loader) return the number that it yields.",
    )


def check_record(engine: Engine, means: Mapping[str, float]) -> None:
    """Refuse to continue after a record of training whose loss is NaN or infinite.

    Called on every rank with the means over all ranks, so all ranks decide the same. No host sync.
    """
    _check_loss(engine, means.get("loss", 0.0))
    engine.skipped_at_record = engine.precision.skipped


def check_since_record(engine: Engine, losses: Iterable[float]) -> None:
    """Do the same for the iterations since the last record: before a checkpoint, and at the end of training.

    Args:
        losses: the sum of each rank.
    """
    _check_loss(engine, sum(losses))


def _check_loss(engine: Engine, loss: float) -> None:
    """Refuse a loss that is not finite, unless a hook acts on it, or fp16 may have skipped the step and its gradients.

    An infinite loss counts like NaN: its gradients are infinite or NaN, or `grad_clip` makes them 0.
    """
    if math.isfinite(loss):
        return
    problem = f"the loss is {loss} at iteration {engine.progress.iteration} or shortly before"
    skipped = engine.precision.skipped != engine.skipped_at_record
    if skipped or engine.settings.allow_nan or any(hook.checks_loss for hook in engine.hooks.values()):
        if engine.distributed.is_main and not engine.warned_of_loss:
            log.warning("%s", problem)
        engine.warned_of_loss = True
        return
    engine.diverged = True
    raise UserError(
        problem,
        key="engine.allow_nan",
        remedy="Find its cause with debug=nan, or leave out the batch that causes it with hooks=rollback. To train on, "
        "set engine.allow_nan=true.",
    )


def check_task(task: Any) -> None:
    """Refuse a module that is not a task, or whose `forward` does not take a batch."""
    if not hasattr(task, "evaluate") or not hasattr(task, "metric_names"):
        raise UserError(
            f"{type(task).__name__} is not a task",
            key="task",
            remedy="Use it as the model of a task, such as hydraloop.tasks.Classification(model, loss, metrics).",
        )
    steps = getattr(task, "steps", ())
    if not isinstance(steps, tuple) or not all(isinstance(name, str) for name in steps):
        raise UserError(
            f"{type(task).__name__}.steps is {steps!r}, not a tuple with the names of steps",
            key="task",
            remedy='Write: steps = ("discriminator", "generator"), or give another name to this attribute.',
        )
    # Evaluation calls it without a step.
    for words, options in (("batch", {}), ("batch, step=…", {"step": ""})) if steps else (("batch", {}),):
        signature = refusing(task.forward, "batch", **options)
        if signature is not None:
            raise UserError(
                f"{type(task).__name__}.forward{signature} cannot be called with ({words})",
                key="task",
                remedy=f"Write: def forward(self, {'batch, step=None' if steps else 'batch'})",
            )


def check_hook(hook: object, key: str) -> None:
    """Refuse an object that is not a hook, or a mount point that does not take what the engine passes.

    Args:
        key: names its option.
    """
    if not isinstance(hook, Hook):
        raise UserError(
            f"{type(hook).__name__} is not a Hook",
            key=key,
            remedy="Inherit from hydraloop.Hook; hydraloop.compat has adapters for hooks of MMEngine and Lightning.",
        )

    for point in (*MOUNT_POINTS, *GENERAL_POINTS):
        if overrides(type(hook), point):
            names = list(inspect.signature(getattr(Hook, point)).parameters)[1:]
            mode = names[-1:] if point in GENERAL_POINTS else []  # passed by its name
            signature = refusing(getattr(hook, point), *names[: len(names) - len(mode)], **dict.fromkeys(mode))
            if signature is not None:
                raise UserError(
                    f"{type(hook).__name__}.{point}{signature} cannot be called with ({', '.join(names)})",
                    key=key,
                    remedy=f"Write: def {point}(self, {', '.join(names)})",
                )


def refusing(function: Any, /, *args: Any, **kwargs: Any) -> inspect.Signature | None:
    """Return the signature of a function that cannot be called with these arguments; None if it can be.

    A decorated function is not looked into, because its decorator may pass other arguments.
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)
    except (ValueError, TypeError):  # some builtins have none
        return None
    try:
        signature.bind(*args, **kwargs)
    except TypeError:
        return signature
    return None


def no_loss_error(task: Any, outputs: Any, step: str = "") -> UserError:
    """Return the error of a task whose output has no loss."""
    got = f"a dict with {sorted(map(str, outputs))}" if isinstance(outputs, dict) else f"a {type(outputs).__name__}"
    return UserError(
        f"{type(task).__name__}.forward returned {got}, without a 'loss'{f', for the step {step!r}' if step else ''}",
        key="task",
        remedy='Return a dict with the scalar to minimise: {"loss": loss}.',
    )


def wrong_loss_error(loss: object) -> UserError:
    """Return the error of a task whose loss is neither a tensor nor a pair."""
    remedy = 'Return a scalar tensor, {"loss": loss}, without .item() and float().'
    return UserError(f"the loss is a {type(loss).__name__}, not a tensor", key="task", remedy=remedy)


def no_gradient_error(step: str) -> UserError:
    """Return the error of a step whose loss depends on no parameter of its optimizer."""
    return UserError(
        f"the loss of the step {step!r} does not depend on the parameters of optimizer.{step}",
        key="task",
        remedy="Compute it with these parameters, without detach() and no_grad(), or exchange the names of the steps.",
    )
