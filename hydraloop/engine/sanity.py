"""The sanity step: batches of the validation go through evaluation and metrics before the run begins."""

from __future__ import annotations

import copy
import logging
import sys
import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from hydraloop.engine.device import seeding
from hydraloop.engine.evaluation import compute, evaluate_batches, in_mode
from hydraloop.engine.hook import Mode
from hydraloop.engine.loaders import Ordered, sets_of
from hydraloop.errors import UserError
from hydraloop.run.result import describe

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)


def check(engine: Engine) -> None:
    """Evaluate the first `engine.sanity_val_steps` batches of the validation, and set `engine.metric_names`.

    Called on each rank; all ranks evaluate the same batches, unless the data is a stream that splits itself. The
    weights are those that the model has been built with.

    Raises:
        Exception: of the data set, the collate function or the task. An error in computing the metrics is a warning,
            because some need more samples.
    """
    settings, loaders = engine.settings, sets_of(engine.loaders.val)
    if engine.tried or not loaders or settings.val_interval is None or not settings.sanity_val_steps:
        return
    numbers: list[str] = []
    matrices: list[str] = []
    try:
        for name, loader in loaders.items():
            with trial(engine, "val", name):
                found = _metrics(engine, first_batches(loader, settings.sanity_val_steps))
            if not found:
                return
            numbers += found
            matrices += [f"{name}/{matrix}".lstrip("/") for matrix in engine.task.pictures]
    except Exception as error:
        error.add_note("In the sanity step before the run, with the first validation data (engine.sanity_val_steps).")
        raise
    engine.metric_names, engine.matrix_names, engine.tried = tuple(numbers), tuple(matrices), True


def _metrics(engine: Engine, batches: list[Any]) -> dict[str, float]:
    """Return the metrics over the batches; an empty dict if they are not known."""
    if not batches:
        return {}
    evaluate_batches(engine, batches)
    try:
        return compute(engine)
    except UserError:
        raise
    except Exception as error:  # of a metric
        if engine.distributed.is_main:
            log.warning(
                "the metrics cannot be computed from %d batch%s, so their names are not checked: %s",
                len(batches), "" if len(batches) == 1 else "es", describe(error),
            )  # fmt: skip
        return {}


@contextmanager
def trial(engine: Engine, mode: Mode, data_set: str = "") -> Iterator[None]:
    """In the body, evaluate without any effect on the run: on generators, buffers, metrics, records and compiled code.

    torch.compile has no effect in the body. Otherwise, the shapes of the first training batch would not be the first
    that it sees, and it would compile other code for training.
    """
    compiled = "torch._dynamo" in sys.modules
    eager: AbstractContextManager[Any] = torch.compiler.set_stance("force_eager") if compiled else nullcontext()
    engine.muted, engine.data_set = True, data_set
    buffers = {name: buffer.clone() for name, buffer in engine.task.named_buffers()}
    try:
        with in_mode(engine, mode), eager, seeding.seeded(engine.seed), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # metrics warn about few samples
            yield
            engine.task.reset_metrics()
    finally:
        engine.muted, engine.data_set = False, ""
        for name, buffer in engine.task.named_buffers():  # a module may count its calls
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])


def first_batches(loader: Any, count: int) -> list[Any]:
    """Return up to `count` batches that a loader of a validation or test would make, without starting workers.

    Those of a loader with indices have the first samples of its data set, so that no sampler is used. If it has
    workers, the samples are those of a copy: a data set may open files at its first sample, in each worker for itself.

    Returns:
        An empty list if the loader can be iterated only once, or its data set cannot be copied.
    """
    if isinstance(loader, DataLoader | Ordered):
        return [_collated(loader, samples, number) for number, samples in enumerate(islice(_samples(loader), count))]
    if hasattr(loader, "first_batches"):  # of a stream
        batches: list[Any] = loader.first_batches(count)
        return batches
    found = iter(loader)
    return [] if found is loader else list(islice(found, count))


def _collated(loader: Any, samples: Any, number: int) -> Any:
    try:
        return loader.collate_fn(samples)
    except Exception as error:
        explain = getattr(loader, "misfit", None)  # of hydraloop's loader
        mistake = None if explain is None else explain(samples, number)
        if mistake is None:
            raise
        raise mistake from error


def _samples(loader: Any) -> Iterator[Any]:
    """Yield what the collate function of a loader gets for each batch."""
    dataset: Any = loader.dataset
    if loader.num_workers:
        try:
            dataset = _copy_of(dataset)
        except Exception:  # of a class of the user
            return
    if isinstance(loader, DataLoader) and loader.batch_sampler is None:  # the data set yields batches
        yield from _items(dataset)
        return
    # A sampler of batches may not know its batch size. Then 2, because some models fail with a batch of 1.
    size = loader.batch_size or getattr(getattr(loader, "batch_sampler", None), "batch_size", None) or 2
    fetch = getattr(dataset, "__getitems__", None)
    if fetch is not None:
        for first in range(0, len(dataset), size):
            yield fetch(list(range(first, min(first + size, len(dataset)))))
        return
    items = _items(dataset)
    while batch := list(islice(items, size)):
        yield batch


def _items(dataset: Any) -> Iterator[Any]:
    if isinstance(dataset, IterableDataset):
        return iter(dataset)
    return (dataset[index] for index in range(len(dataset)))


def _copy_of(data: Any) -> Any:
    """Return a shallow copy of a data set and of those that it wraps."""
    copied = copy.copy(data)
    attributes = getattr(copied, "__dict__", {})
    if "dataset" in attributes:
        attributes["dataset"] = _copy_of(data.dataset)
    if isinstance(attributes.get("datasets"), list | tuple):
        attributes["datasets"] = [_copy_of(each) for each in data.datasets]
    return copied
