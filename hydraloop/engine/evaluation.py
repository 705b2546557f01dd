"""Evaluation: when to validate, and the loop over a loader, in which each sample counts once over all ranks."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from hydraloop.engine.checks import check_evaluable
from hydraloop.engine.device.seeding import seeded, with_states
from hydraloop.engine.hook import Mode
from hydraloop.engine.loaders import Loader, Loaders, sets_of, share_of
from hydraloop.engine.records.matrix import log_matrices
from hydraloop.engine.stages import Call
from hydraloop.engine.train_mode import in_eval_mode
from hydraloop.errors import UserError

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


def validation_due(engine: Engine) -> bool:
    """Return whether to validate now: by the interval or at the end of training, once for each iteration.

    A stop by `max_time` is not an end: a resumed run trains on, as if it had never stopped. A preempted run does not
    validate; a resumed run does it instead.
    """
    progress, rule = engine.progress, engine._validation
    if engine.preempted_by is not None:
        return False
    if engine.loaders.val is None or rule.interval is None or progress.last_validation == progress.iteration:
        return False
    ends = progress.iteration >= engine.max_iters or engine.stop_reason not in (None, engine.settings.out_of_time)
    if engine.settings.val_by_epoch:
        return ends or (progress.batch_in_epoch == 0 and rule.due(progress.epoch))
    return rule.due(progress.iteration, done=progress.last_validation, last=ends)


class Preempted(BaseException):
    """Raised in a validation or test that is left because the run is preempted. No hook may catch it."""


@contextmanager
def unless_preempted(engine: Engine) -> Iterator[None]:
    """Leave the body if the run is preempted in it: the metrics are dropped, and a resumed run evaluates again."""
    try:
        yield
    except Preempted:
        engine.data_set = ""


@contextmanager
def in_mode(engine: Engine, mode: Mode) -> Iterator[None]:
    """Set `engine.mode` in the body."""
    engine.mode = mode
    try:
        yield
    finally:
        engine.mode = "train"


@contextmanager
def evaluating(engine: Engine) -> Iterator[None]:
    """In the body, `engine.during_evaluation` may enter contexts; they are left at its end."""
    try:
        with ExitStack() as engine._evaluation:
            yield
    finally:
        engine._evaluation = None


def evaluate(
    engine: Engine, loaders: Loader | Mapping[str, Loader] | None, before: Sequence[Call], after: Sequence[Call]
) -> dict[str, float]:
    """Evaluate each data set and return the metrics over all ranks' samples, the same on each rank.

    Two host syncs for each data set.
    """
    metrics: dict[str, float] = {}
    for engine.data_set, loader in sets_of(loaders).items():
        with seeded(_seed(engine, engine.mode, engine.data_set)):
            evaluate_batches(engine, loader, before, after)
            metrics |= compute(engine)
    engine.data_set = ""
    return metrics


def _seed(engine: Engine, mode: Mode, data_set: str) -> int:
    """Return a seed for the random numbers of an evaluation on this rank.

    So the same weights have the same metrics in each evaluation, and training does not depend on validations.
    """
    return random.Random(f"{engine.seed}/{engine.distributed.rank}/{mode}/{data_set}").getrandbits(63)


@torch.no_grad()
def evaluate_batches(
    engine: Engine, loader: Loader | None, before: Sequence[Call] = (), after: Sequence[Call] = ()
) -> None:
    """Reset the metrics and add the batches of a loader, with all modules in eval mode; called on every rank.

    Args:
        before: called before each batch.
        after: called after each batch.
    """
    task, ranks = engine.task, engine.distributed
    share = share_of(loader)
    length = len(loader or ())
    engine.evaluation_length = end = engine.settings.limited(engine.mode, length)
    with in_eval_mode(task):
        ranks.before_evaluation(task)
        try:
            task.reset_metrics()
            for batch_idx, batch in enumerate(engine.on_device(loader, count=end if end < length else None)):
                if perf_counter() > engine.requeue_at:
                    engine.preempt(engine.settings.requeue)
                if share is not None:  # all ranks have equally many batches
                    engine._requests.exchange_in_evaluation(batch_idx)
                if engine.preempted_by is not None:
                    raise Preempted
                if share is not None and share(batch_idx)[0] == 0:  # only other ranks have samples in this batch
                    if ranks.sharded:  # they need this rank's shard
                        with task.uncounted():
                            engine.evaluate_batch(batch)
                    continue
                for call in before:
                    call(engine, batch_idx, batch)
                outputs = engine.evaluate_batch(batch)
                for call in after:
                    call(engine, batch_idx, batch, outputs)
        finally:
            ranks.after_evaluation()


@torch.no_grad()
def compute(engine: Engine) -> dict[str, float]:
    """Return the metrics over all batches since the last reset; called on every rank. Two host syncs."""
    ranks = engine.distributed
    metrics: dict[str, float] = ranks.from_main(engine.task.compute_metrics(ranks.sum, ranks.gather))
    prefix = f"{engine.data_set}/" if engine.data_set else ""
    log_matrices(engine, prefix)
    return {prefix + name: value for name, value in metrics.items()}


def only_test_set(loaders: Loaders) -> Loader:
    """Return the loader of the test.

    Raises:
        UserError: there is no test data, or several sets of it.
    """
    check_evaluable(loaders.test, "data.test")
    (name, loader), *others = sets_of(loaders.test).items()
    if others or name:
        raise UserError(
            "there may be several data sets of the test",
            key="data.test",
            remedy=f"Name one: engine.predict(engine.loaders.test[{name!r}]).",
        )
    return loader


@torch.no_grad()
def predict_batches(engine: Engine, loader: Loader | None) -> Iterator[Any]:
    """Yield the task's predictions of all samples, in order, on the CPU; see `Engine.predict`. Called on every rank."""
    task, ranks, share = engine.task, engine.distributed, share_of(loader)
    if loader is None:  # as engine.loaders.val, if it was not loaded
        remedy = "For the data set of a finished run: hydraloop.load(…, splits=['val'])."
        raise UserError("predict got None, not a loader", key="loader", remedy=remedy)
    predict = engine.precision.forward(task.predict)
    if share is None and ranks.world_size > 1:
        raise UserError(
            f"{type(loader).__name__} does not say which samples each of {ranks.world_size} processes gets, so their "
            "order is not known",
            key="distributed.nproc_per_node",
            remedy="Use distributed.nproc_per_node=1.",
        )
    mode, data_set = _place_of(loader, engine.loaders)
    with engine.precision.active(), in_mode(engine, mode), evaluating(engine), in_eval_mode(task):
        for call in engine.stages.before_val_epoch if mode == "val" else engine.stages.before_test_epoch:  # ema and tta
            call(engine)
        ranks.before_evaluation(task)
        try:
            with seeded(_seed(engine, mode, data_set)) as outside:
                for batch_idx, batch in enumerate(engine.on_device(loader)):
                    own = _of_samples(predict(batch), task.num_samples(batch), type(task).__name__)
                    has_samples = share is None or share(batch_idx)[0] > 0  # in a filler, only other ranks have samples
                    parts = [part for part in ranks.gather(own if has_samples else None) if part is not None]
                    with with_states(outside):  # the caller draws from its own generators
                        yield from parts
        except Exception as error:
            ranks.abandon(error)
            raise
        finally:
            ranks.after_evaluation()


def _place_of(loader: Loader, loaders: Loaders) -> tuple[Mode, str]:
    """Return the mode and the data set of a loader; another loader's are those of a test of a single one."""
    places: list[tuple[Mode, Any]] = [("val", loaders.val), ("test", loaders.test)]
    found = ((mode, name) for mode, sets in places for name, one in sets_of(sets).items() if one is loader)
    return next(found, ("test", ""))


def _of_samples(predictions: Any, samples: int, task: str) -> Any:
    """Return predictions on the CPU: a tensor or a list with an entry for each sample, or a dict of these.

    Raises:
        UserError: they are not that.
    """
    parts = dict(predictions) if isinstance(predictions, Mapping) else {"": predictions}
    for name, part in parts.items():
        if not isinstance(part, Tensor | list) or not getattr(part, "ndim", 1) or len(part) != samples:
            what = f"{type(part).__name__} {list(part.shape)}" if isinstance(part, Tensor) else type(part).__name__
            raise UserError(
                f"{task}.predict returned {f'{name}: ' if name else ''}{what} for {samples} samples",
                key="task",
                remedy="Return a tensor or a list with an entry for each sample, or a dict of these.",
            )
        parts[name] = part.cpu() if isinstance(part, Tensor) else part
    return parts if isinstance(predictions, Mapping) else parts[""]
