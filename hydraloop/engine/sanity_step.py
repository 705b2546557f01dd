"""The sanity step: a few validation batches before a run. It finds mistakes early, and the names of the metrics."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from hydraloop.engine.loaders import Loader, end_workers
from hydraloop.engine.records import Records
from hydraloop.engine.run_parts import Run
from hydraloop.engine.seeding import seeded
from hydraloop.errors import UserError
from hydraloop.files.result import describe

if TYPE_CHECKING:
    from hydraloop.engine.evaluator import Evaluator

log = logging.getLogger(__name__)


def metric_names(
    evaluator: Evaluator, run: Run, records: Records, data_sets: Mapping[str, Loader]
) -> tuple[str, ...] | None:
    """Evaluate the first `engine.sanity_val_steps` batches of each data set; called on every rank.

    The weights are those that the model was built with. The run does not change.

    Returns:
        The names of the metrics; None if they cannot be computed from so few batches.

    Raises:
        Exception: raised by the data set, the collate function or the task.
    """
    names: list[str] = []
    try:
        for data_set, loader in data_sets.items():
            evaluator.data_set = data_set
            with _without_effect(run, records):
                evaluator.run_batches(loader, most=run.settings.sanity_val_steps)
                metrics = _compute(evaluator, is_main=run.ranks.is_main)
                run.task.reset_metrics()
            end_workers(loader)  # hooks may change the data set before the first validation
            if not metrics:
                return None
            names += metrics
    except Exception as error:
        error.add_note("In the sanity step before the run, with the first validation data (engine.sanity_val_steps).")
        raise
    finally:
        evaluator.data_set = ""
    return tuple(names)


def _compute(evaluator: Evaluator, *, is_main: bool) -> dict[str, float]:
    """Return the metrics. If one cannot be computed, warn and return none: some metrics need more samples."""
    try:
        return evaluator.compute()
    except UserError:
        raise
    except Exception as error:
        if is_main:
            log.warning(
                "the metrics cannot be computed from %d batch%s, so their names are not checked: %s",
                evaluator.length, "" if evaluator.length == 1 else "es", describe(error),
            )  # fmt: skip
        return {}


@contextmanager
def _without_effect(run: Run, records: Records) -> Iterator[None]:
    """In the body, validate without any effect on the run: generators, buffers, records, warnings, compiled code."""
    # Without torch.compile: the shapes of the first training batch must be the first that it sees. Otherwise, it would
    # compile other code for training.
    is_compiled = "torch._dynamo" in sys.modules
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager") if is_compiled else nullcontext()
    buffers = {name: buffer.clone() for name, buffer in run.task.named_buffers()}
    try:
        with records.muted(), run.progress.in_mode("val"), eager, seeded(run.seed), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # metrics warn about few samples
            yield
    finally:
        for name, buffer in run.task.named_buffers():  # a module may count its calls
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])
