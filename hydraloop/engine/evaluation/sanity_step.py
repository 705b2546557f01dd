"""The sanity step: batches of the validation go through evaluation and metrics before the run begins."""

from __future__ import annotations

import logging

from hydraloop.engine.evaluation.evaluator import Evaluator
from hydraloop.engine.loaders import Loader, Loaders, end_workers, sets_of
from hydraloop.engine.run import Run
from hydraloop.errors import UserError
from hydraloop.run_files.result import describe

log = logging.getLogger(__name__)


def check_validation(run: Run, loaders: Loaders, evaluator: Evaluator) -> None:
    """Evaluate the first `engine.sanity_val_steps` batches of the validation, once, and set the names of the metrics.

    Called on each rank. The weights are those that the model has been built with.

    Raises:
        Exception: of the data set, the collate function or the task. An error in computing the metrics is a warning,
            because some need more samples.
    """
    settings, data_sets = run.settings, sets_of(loaders.val)
    if evaluator.names_are_known or settings.val_interval is None or not settings.sanity_val_steps:
        return
    numbers: list[str] = []
    matrices: list[str] = []
    try:
        for name, loader in data_sets.items():
            with evaluator.without_effect(name):
                found = _metrics(evaluator, loader, settings.sanity_val_steps, run.ranks.is_main)
            end_workers(loader)  # hooks may change the data set before the first validation
            if not found:
                return
            numbers += found
            matrices += [f"{name}/{matrix}".lstrip("/") for matrix in run.task.pictures]
    except Exception as error:
        error.add_note("In the sanity step before the run, with the first validation data (engine.sanity_val_steps).")
        raise
    if data_sets:
        evaluator.set_metric_names(tuple(numbers), tuple(matrices))


def _metrics(evaluator: Evaluator, loader: Loader, steps: int, is_main: bool) -> dict[str, float]:
    """Return the metrics over the first batches of a loader; an empty dict if they are not known."""
    evaluator.run_batches(loader, most=steps)
    try:
        return evaluator.compute()
    except UserError:
        raise
    except Exception as error:  # of a metric
        if is_main:
            log.warning(
                "the metrics cannot be computed from %d batch%s, so their names are not checked: %s",
                evaluator.length, "" if evaluator.length == 1 else "es", describe(error),
            )  # fmt: skip
        return {}
