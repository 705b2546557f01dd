"""Predictions: the outputs of a task for all samples of a loader, in order."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from hydraloop.engine.batch_transfer import to_cpu
from hydraloop.engine.batches import Batches
from hydraloop.engine.evaluator import Evaluator, check_evaluable, equal_buffers
from hydraloop.engine.hook import Mode
from hydraloop.engine.loaders import Loader, Loaders, sets_of, share_of
from hydraloop.engine.model_preparation import in_eval_mode
from hydraloop.engine.run_parts import Run
from hydraloop.engine.seeding import seeded
from hydraloop.errors import UserError


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
def predict_batches(run: Run, batches: Batches, evaluator: Evaluator, loader: Loader | None) -> Iterator[Any]:
    """Yield the predictions (`task.predict`) for all samples, in order and each once, on the CPU.

    The predictions are those of a test, or of a validation for a loader in `loaders.val`: in eval mode, with `ema` and
    `tta`. Of the hooks, only before_test_epoch or before_val_epoch is called.

    Each item has the predictions of one batch of one rank, so `torch.cat(list(engine.predict()))` has all. With several
    ranks, call it on each one, and iterate to the end; each rank gets the predictions of all. Until the end, the engine
    must not be used for anything else.

    Raises:
        UserError: the predictions have no entry for each sample; or, with several ranks, the loader does not say which
            samples each one gets.
    """
    task, ranks, samples_at = run.task, run.ranks, share_of(loader)
    if loader is None:  # as engine.loaders.val, if it was not loaded
        remedy = "For the data set of a finished run: hydraloop.load(…, splits=['val'])."
        raise UserError("predict got None, not a loader", key="loader", remedy=remedy)
    predict = run.precision.forward(task.predict)
    if samples_at is None and ranks.world_size > 1:
        raise UserError(
            f"{type(loader).__name__} does not say which samples each of {ranks.world_size} processes gets, so their "
            "order is not known",
            key="distributed.nproc_per_node",
            remedy="Use distributed.nproc_per_node=1.",
        )
    mode, data_set = _place_of(loader, batches.loaders)
    before_epoch = run.calls.before_val_epoch if mode == "val" else run.calls.before_test_epoch
    with run.precision.active(), run.progress.in_mode(mode), evaluator.evaluating(), in_eval_mode(task):
        before_epoch()  # ema and tta
        try:
            with equal_buffers(run), seeded(evaluator.seed_of(mode, data_set)):
                for batch_idx, batch in enumerate(batches.on_device(loader)):
                    own = _of_samples(predict(batch), task.num_samples(batch), type(task).__name__)
                    # In a filler batch, only other ranks have samples.
                    has_samples = samples_at is None or samples_at(batch_idx)[0] > 0
                    parts = [part for part in ranks.gather(own if has_samples else None) if part is not None]
                    yield from parts
        except Exception as error:
            ranks.abandon(error)
            raise


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
        parts[name] = to_cpu(part)
    return parts if isinstance(predictions, Mapping) else parts[""]
