"""Evaluating: the task's `evaluate` over a loader, each sample once whatever the number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import nn

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.inputs import Loader, share_of
from hydraloop.engine.stages import Call
from hydraloop.engine.train_mode import in_eval_mode

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


@contextmanager
def given_alike(ranks: Distributed, task: nn.Module) -> Iterator[None]:
    """All ranks with the same to evaluate."""
    ranks.before_evaluation(task)
    try:
        yield
    finally:
        ranks.after_evaluation()


@torch.no_grad()
def evaluate(engine: Engine, loader: Loader | None, before: Sequence[Call], after: Sequence[Call]) -> dict[str, float]:
    """Go over a loader in eval mode; on every rank.

    Args:
        before: called before each batch, `after`: behind it.

    Returns:
        The metrics over all ranks' samples, the same on each. One host sync.
    """
    task, ranks = engine.task, engine.distributed
    share = share_of(loader)
    with in_eval_mode(task), given_alike(ranks, task):
        task.reset_metrics()
        for batch_idx, batch in enumerate(engine.on_device(loader)):
            if share is not None and share(batch_idx)[0] == 0:  # another rank's turn; it may need this one's shard
                if ranks.sharded:
                    with task.uncounted():
                        engine.evaluate_batch(batch)
                continue
            for call in before:
                call(engine, batch_idx, batch)
            outputs = engine.evaluate_batch(batch)
            for call in after:
                call(engine, batch_idx, batch, outputs)
    metrics: dict[str, float] = ranks.from_main(task.compute_metrics(ranks.sum, ranks.gather))
    return metrics
