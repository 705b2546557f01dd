"""The means of logged scalars over all ranks: the loss in a record is averaged here."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from hydraloop.engine.distributed.comm import Distributed


class MeanOverRanks:
    """Averages named numbers over the ranks that have them, in one exchange.

    The ranks add up one vector, whose layout depends on `_names`. They are the same on all ranks, because they change
    only by what was gathered from all ranks.
    """

    def __init__(self) -> None:
        self._names: list[str] = []

    def mean(
        self, values: dict[str, float], ranks: Distributed, weights: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Return the mean of each name over the ranks that have it; called on every rank.

        One exchange among the hosts; three more for a name that no rank has had before.

        Args:
            values: of this rank.
            ranks: all ranks.
            weights: of values on this rank; by default, each rank that has a name has the same weight.
        """
        shares = dict.fromkeys(values, 1.0) | dict(weights or {})
        while True:
            names = self._names
            has_new = float(not values.keys() <= set(names))
            counts = [shares.get(name, 0.0) for name in names]
            totals = [count * values[name] if count else 0.0 for name, count in zip(names, counts, strict=True)]
            row = [has_new, *counts, *totals]
            has_new, *sums = ranks.sum(torch.tensor(row, dtype=torch.float64)).tolist()
            if not has_new:
                break
            self._names = sorted({*names, *(name for theirs in ranks.gather(list(values)) for name in theirs)})
        counts, totals = sums[: len(names)], sums[len(names) :]
        means = {name: total / count for name, count, total in zip(names, counts, totals, strict=True) if count}
        return {name: means[name] for name in dict.fromkeys([*values, *means])}
