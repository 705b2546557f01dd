"""A test step on one or two samples before training, to find mistakes that only the test would show."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from hydraloop.engine.device import seeding
from hydraloop.engine.train_mode import in_eval_mode

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


def some_batch(loader: Any) -> Any:
    """Return a batch of two samples (one if there is only one) as the loader would make it, or a list's first batch.

    Returns None if a batch cannot be made without side effects: with worker processes nothing is read, because a data
    set may open files at its first sample, separately in each worker. The random generators are unchanged.
    """
    if isinstance(loader, Sequence):
        return loader[0] if loader else None
    batched = getattr(loader, "batch_sampler", None) is not None and callable(getattr(loader, "collate_fn", None))
    if not batched or getattr(loader, "num_workers", None) != 0:
        return None
    generators = seeding.rng_state()
    try:
        dataset, fetch = loader.dataset, getattr(loader.dataset, "__getitems__", None)
        # Two, because some models drop a dimension of size 1.
        indices = list(range(min(2, len(dataset))))
        return loader.collate_fn([dataset[index] for index in indices] if fetch is None else fetch(indices))
    finally:
        seeding.set_rng_state(generators)


@torch.no_grad()
def try_test(engine: Engine, batch: Any) -> None:
    """Do one step of the test as the engine would; metrics, modes and generators are unchanged."""
    task = engine.task
    generators = seeding.rng_state()
    try:
        with in_eval_mode(task):
            task.reset_metrics()  # moves them to the device
            with task.uncounted():
                for moved in engine.on_device([batch]):
                    engine.evaluate_batch(moved)
    finally:
        seeding.set_rng_state(generators)


def can_try(engine: Engine) -> bool:
    """Return whether an additional step is harmless: a sharded model needs all ranks, a compiled one another
    compilation."""
    # torch has no public way to ask whether a module is compiled, by module.compile() or by torch.compile(module).
    compiled = any(
        getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
        for module in engine.task.modules()
    )
    return not (compiled or engine.distributed.sharded)
