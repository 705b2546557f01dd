"""A step of the test on a sample or two, before anything is trained: mistakes that only the test would see."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hydraloop.engine.device import seeding
from hydraloop.engine.train_mode import in_eval_mode

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


def some_batch(loader: Any) -> Any:
    """A batch of two samples (of one, where there is no other), as the loader would make it, or a list's first batch.

    None where it cannot be had without a risk. With worker processes nothing is read: a data set may open files at its
    first sample, and must do so in each worker. The generators stay where they are.
    """
    if isinstance(loader, Sequence):
        return loader[0] if loader else None
    batched = getattr(loader, "batch_sampler", None) is not None and callable(getattr(loader, "collate_fn", None))
    if not batched or getattr(loader, "num_workers", None) != 0:
        return None
    generators = seeding.rng_state()
    try:
        dataset, fetch = loader.dataset, getattr(loader.dataset, "__getitems__", None)
        # Two: of a single one, some models drop the dimension.
        indices = list(range(min(2, len(dataset))))
        return loader.collate_fn([dataset[index] for index in indices] if fetch is None else fetch(indices))
    finally:
        seeding.set_rng_state(generators)


@torch.no_grad()
def try_test(engine: Engine, batch: Any) -> None:
    """One step of the test, as the engine would do it; metrics, modes and generators stay as they are."""
    task = engine.task
    generators = seeding.rng_state()
    try:
        with in_eval_mode(task):
            task.reset_metrics()  # which are on the device then
            with task.uncounted():
                for moved in engine.on_device([batch]):
                    engine.evaluate_batch(moved)
    finally:
        seeding.set_rng_state(generators)


def can_try(engine: Engine) -> bool:
    """Whether a step more is harmless: a model in shards needs all ranks, a compiled one a compilation for its size."""
    # torch has no public way to ask whether a module is compiled, by module.compile() or by torch.compile(module).
    compiled = any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in engine.task.modules()
    )
    return not (compiled or engine.distributed.sharded)
