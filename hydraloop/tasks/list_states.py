"""Metrics of torchmetrics whose states are lists (AUROC, SpearmanCorrCoef, …), on ranks without samples."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor


def agree_on_list_states(metrics: Iterable[Any], gather: Callable[[Any], list[Any]]) -> None:
    """Give the list states of metrics the same dtype and number of dimensions on every rank, in place.

    In torchmetrics 1.9, a rank without samples sends `[0]` floats to ranks that expect `[N, classes]` or integers, and
    gloo aborts. Here it gets an empty tensor like those of the other ranks, and the list of each other rank becomes one
    tensor, as in torchmetrics' own gathering. Only states that are concatenated (`dist_reduce_fx="cat"`) are changed:
    others have no value without samples.

    Called on every rank with the same metrics, before they are computed. One `gather` for all metrics, a host sync;
    none if there is no such metric.

    Args:
        metrics: any; those that are not torchmetrics' are ignored.
        gather: returns a plain value of all ranks, by rank.
    """
    states = list(_cat_states(metrics))
    if not states:
        return
    joined = [_cat(getattr(metric, name)) for metric, name in states]
    of_ranks = gather([None if state is None else state[:0].cpu() for state in joined])
    if len(of_ranks) == 1:
        return
    for (metric, name), state, empties in zip(states, joined, zip(*of_ranks, strict=True), strict=True):
        known = [empty for empty in empties if empty is not None]
        if state is not None:
            setattr(metric, name, [state])
        elif known:
            setattr(metric, name, [known[0].to(metric.device)])


def _cat_states(metrics: Iterable[Any]) -> Iterator[tuple[Any, str]]:
    """Yield (metric, name) of each list state that is concatenated over the ranks, also in wrapped metrics."""
    torchmetrics: Any = sys.modules.get("torchmetrics")
    if torchmetrics is None:  # so none of the metrics is from it
        return
    cat = torchmetrics.utilities.data.dim_zero_cat
    for metric in metrics:
        for part in metric.modules() if isinstance(metric, torch.nn.Module) else ():
            if isinstance(part, torchmetrics.Metric) and part.sync_on_compute:
                for name, state in part.metric_state.items():
                    # add_state() has set it; torchmetrics has no public name for it.
                    if isinstance(state, list) and part._reductions[name] is cat:
                        yield part, name


def _cat(state: list[Tensor]) -> Tensor | None:
    """Return all batches as one tensor `[N, ...]`; None without batches."""
    if not state:
        return None
    return torch.cat([batch.reshape(1) if batch.ndim == 0 else batch for batch in state])
