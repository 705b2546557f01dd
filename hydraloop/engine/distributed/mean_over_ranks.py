"""Named numbers over all ranks: sums in one exchange, and the means of the scalars in a record."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hydraloop.engine.distributed.comm import Distributed


class SumsByName:
    """Adds up pairs of numbers by name over the ranks, in one exchange.

    The ranks add up one vector, whose layout depends on `names`. These are the same on all ranks, because they change
    only by what was gathered from all ranks.

    Args:
        names: which every rank has.
    """

    def __init__(self, *names: str) -> None:
        self.names = [*names]
        """The names that a rank has had."""

    def over_ranks(
        self,
        mine: Mapping[str, Tensor],
        zeros: Tensor,
        reduce: Callable[[Tensor], Tensor],
        gather: Callable[[Any], list[Any]],
        parts: Sequence[Tensor] = (),
    ) -> tuple[dict[str, tuple[float, float]], list[Tensor]]:
        """Return the sum of each name, and the vectors `parts` summed; called on every rank. One host sync.

        Args:
            mine: a tensor `[2]` for each name of this rank.
            zeros: a tensor `[2]`, for the names that this rank does not have.
            reduce: sums a vector over all ranks. Called again if a rank has a new name.
            gather: returns a plain value of all ranks. Called for new names.
            parts: other vectors to sum.
        """
        while True:
            rows = [mine.get(name, zeros) for name in self.names]
            is_new = zeros[:1] + (not mine.keys() <= set(self.names))
            row = reduce(torch.cat([is_new, *rows, *parts]))
            head, *summed = torch.split(row, [1 + 2 * len(rows), *map(len, parts)])
            has_new, *sums = head.tolist()
            if not has_new:
                return dict(zip(self.names, zip(sums[::2], sums[1::2], strict=True), strict=True)), summed
            of_ranks = (self.names, *gather(list(mine)))
            self.names = list(dict.fromkeys(name for names in of_ranks for name in names))


class MeanOverRanks:
    """Averages named numbers over the ranks that have them, in one exchange."""

    def __init__(self) -> None:
        self._sums = SumsByName()

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
        pairs = {name: [shares[name] * value, shares[name]] for name, value in values.items() if shares[name]}
        mine = {name: torch.tensor(pair, dtype=torch.float64) for name, pair in pairs.items()}
        zeros = torch.zeros(2, dtype=torch.float64)
        sums, _ = self._sums.over_ranks(mine, zeros, ranks.sum, ranks.gather)
        means = {name: total / count for name, (total, count) in sums.items() if count}
        return {name: means[name] for name in dict.fromkeys([*values, *means])}
