"""What hooks tell each other: facts, read on demand, and scalars, averaged between two records without a host sync.

The mean over ranks is in `distributed/mean_over_ranks.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.mean_over_ranks import MeanOverRanks
from hydraloop.engine.records.entries import NUMBERS, RESERVED, check_names, plain
from hydraloop.engine.records.sums import Values, read_sums

_NOT_SCALARS = frozenset({"loss", "outputs", "targets", "predictions"})
_TAKEN = frozenset({*RESERVED, *NUMBERS})
_TIMES = frozenset({"time", "data_time"})


class Messages:
    """Facts and scalars that hooks tell each other.

    A fact is a function that is called when it is read, so it costs nothing in other iterations. A scalar is added in
    every iteration; a record takes the mean (`means`).
    """

    def __init__(self) -> None:
        self._facts: dict[str, Callable[[], Any]] = {}
        self._values: dict[str, Values] = {}
        self._over_ranks = MeanOverRanks()

    # Facts. ----------------------------------------------------------------------------------------------------------

    def provide(self, name: str, read: Callable[[], Any]) -> None:
        """Provide the fact `name` (epoch, lr, …); `read` returns its value."""
        self._facts[name] = read

    def read(self, name: str, default: Any = None) -> Any:
        """Return the value of a fact, or `default` if nothing provides it. Synchronizes only if its provider does."""
        provider = self._facts.get(name)
        return default if provider is None else provider()

    def facts(self) -> dict[str, Any]:
        """Return all facts by name, in the order in which they were first provided."""
        return {name: read() for name, read in self._facts.items()}

    # Scalars. --------------------------------------------------------------------------------------------------------

    def add(self, name: str, value: float | Tensor, weight: float | Tensor | None = None) -> None:
        """Add one iteration's value: a float, or a detached scalar tensor, which stays on its device (no host sync).

        Any other value is a `UserError` at the next record, because a check here would cost more than the addition.

        Args:
            name: in the record.
            value: of this rank.
            weight: of the value in the mean, such as its number of samples or terms, 0 or more: a number, or a scalar
                tensor on the value's device. The number 0 ignores the value. None: each iteration has the same weight,
                which the ranks share.
        """
        values = self._values.get(name)
        if values is None:
            values = self._values[name] = Values(name)
        values.add(value, weight)

    def means(self, over: Distributed | None = None) -> dict[str, float]:
        """Return the mean of each name since the last call, and begin again for the next record.

        One host sync for each device that has values, for any number of names. With several ranks, one exchange among
        the hosts; three more for a name that no rank has had before.

        Args:
            over: the ranks over which the mean is taken; called on each of them. None: this rank alone. If only some
                ranks have a name, the mean is over these.
        """
        read = self._read()
        self._values.clear()
        means = {name: total / (weight + count) for name, (total, weight, count) in read.items() if weight + count}
        if over is None or over.world_size == 1:
            return means
        return self._over_ranks.mean(means, over, {name: read[name][1] or 1.0 for name in means})

    def total(self, name: str) -> float:
        """Return the weighted sum of a name since the last record; 0 without values. One host sync for each device."""
        values = self._values.get(name)
        if values is None:
            return 0.0
        values.fold()
        return read_sums([values.total])[0]

    def state_dict(self) -> dict[str, list[float]]:
        """Return the sum, weight and count since the last record, without times. One host sync for each device that has
        values."""
        return {name: list(read) for name, read in self._read().items() if name not in _TIMES}

    def load_state_dict(self, states: Sequence[Mapping[str, Sequence[float]] | None], over: Distributed) -> None:
        """Replace the sums by those of the states, so that the next record is as without a stop.

        Args:
            states: of each rank of the saved run. Another number of ranks divides their sums equally.
            over: the ranks of this run.
        """
        self._values.clear()
        same = len(states) == over.world_size
        for state in states[over.rank : over.rank + 1] if same else states:
            for name, entry in (state or {}).items():
                total, weight, count = entry
                # Weights are numbers of samples. Without them, each iteration counts once on each rank.
                ranks = 1 if same else over.world_size if weight else len(states)
                values = self._values.setdefault(name, Values(name))
                values.total.add(total / ranks)
                values.weight.add(weight / ranks)
                values.count += count / ranks

    def _read(self) -> dict[str, tuple[float, float, float]]:
        """Return the sum, weight and count of each name."""
        for values in self._values.values():
            values.fold()
        pairs = {name: (values.total, values.weight) for name, values in self._values.items()}
        numbers = iter(read_sums([part for pair in pairs.values() for part in pair]))
        return {name: (next(numbers), next(numbers), self._values[name].count) for name in pairs}


def scalars_of(outputs: Mapping[str, Any]) -> Iterator[tuple[str, float | Tensor]]:
    """Yield the numbers and scalar tensors that a task returned, except `loss`; tensors without their graphs.

    A tensor `[1]` may be a value for each sample, so it is a scalar only if its name contains "loss". No host sync.

    Raises:
        UserError: a scalar has the name of one of the engine's numbers.
    """
    for name, value in outputs.items():
        if name in _NOT_SCALARS:
            continue
        if isinstance(value, Tensor):
            if value.ndim and (value.numel() != 1 or "loss" not in name):
                continue
            changes = value.is_leaf  # a parameter or buffer, whose value the next iteration replaces
            value = value.detach().reshape(())  # the graph would keep all activations in memory
            value = value.clone() if changes else value
        elif not isinstance(value := plain(value), int | float):
            continue
        if name in _TAKEN:
            check_scalar_name(name)
        yield name, value


def check_scalar_name(name: str) -> None:
    """Reject the name of a task's scalar that records already use.

    Raises:
        UserError: it is one of the engine's numbers.
    """
    check_names([name], key="task", remedy="Give the task's scalar another name.", reserved=_TAKEN)
