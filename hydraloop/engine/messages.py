"""What hooks tell each other: facts, read on demand, and scalars, averaged between two records without a host sync."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.hook import Mode
from hydraloop.engine.progress import Progress
from hydraloop.errors import UserError
from hydraloop.files.metrics_log import NONFINITE, OBJECTS, STAMP

POSITION = ("mode", "epoch", "iteration")
"""The first entries."""
PLAIN = frozenset({float, int, str, bool, type(None)})
"""Types of nearly all values."""
RESERVED = (*POSITION, OBJECTS, NONFINITE, STAMP)
"""Names that no value of a record may have."""
NUMBERS = (
    *("loss", "grad_norm", "lr", "momentum", "eta", "time", "data_time", "samples_per_second", "memory"),
    "skipped",
)
"""Names of the numbers that the engine and its hooks put into the records of training."""
_NOT_SCALARS = frozenset({"loss", "outputs", "targets", "predictions"})
TAKEN = frozenset({*RESERVED, *NUMBERS})
"""Names that no scalar of a task may have."""
_TIMES = frozenset({"time", "data_time"})


class _Sum:
    """A sum of numbers, and of tensors on each device."""

    __slots__ = ("number", "tensors")

    def __init__(self) -> None:
        self.number = 0.0
        self.tensors: dict[torch.device, Tensor] = {}

    def add(self, value: float | Tensor, times: float = 1.0) -> None:
        """Add a number or a scalar tensor, multiplied by `times`. No host sync."""
        if not isinstance(value, Tensor):
            self.number += value * times
            return
        total = self.tensors.get(value.device)
        if total is None:
            wide = torch.float32 if value.device.type == "mps" else torch.float64  # mps has no float64
            with torch.inference_mode(False):  # else it could not be added to in training
                total = self.tensors[value.device] = torch.zeros((), dtype=wide, device=value.device)
        total.add_(value, alpha=times)


class _Values:
    """The sums of the values of one name since the last record.

    Args:
        name: in the record.
    """

    __slots__ = ("count", "name", "total", "weight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.total = _Sum()
        """The values times their weights."""
        self.weight = _Sum()
        """The weights."""
        self.count = 0.0
        """The number of values without a weight."""

    def add(self, value: Any, weight: float | Tensor | None) -> None:
        """Add a value. No host sync.

        Raises:
            UserError: a tensor has its graph.
        """
        if isinstance(value, Tensor):
            if value.requires_grad:
                raise UserError(
                    f"a hook or task adds {self.name!r} to engine.messages with its graph, and keeps all activations",
                    remedy=f"Add the value's .detach(): engine.messages.add({self.name!r}, value.detach()).",
                )
            value = value.reshape(()) if value.ndim else value
        else:
            value = float(value)
        if weight is None:
            self.total.add(value)
            self.count += 1
        elif isinstance(weight, Tensor):
            weight = weight.detach().reshape(()).to(torch.float64 if weight.device.type != "mps" else torch.float32)
            self.total.add(value * weight)
            self.weight.add(weight)
        elif weight:  # the loss of a filler batch, with the weight 0, may be NaN
            self.total.add(value, weight)
            self.weight.add(weight)


def _read(sums: list[_Sum]) -> list[float]:
    """Return each sum as a number; one host sync for each device."""
    totals = [one.number for one in sums]
    for device in {device for one in sums for device in one.tensors}:
        having = [index for index, one in enumerate(sums) if device in one.tensors]
        stacked = torch.stack([sums[index].tensors[device] for index in having])
        for index, number in zip(having, stacked.tolist(), strict=True):
            totals[index] += number
    return totals


class Messages:
    """Facts and scalars that hooks tell each other.

    A fact is a function that is called when it is read, so it costs nothing in other iterations. A scalar is added in
    every iteration; a record takes the mean (`means`).
    """

    def __init__(self) -> None:
        self._facts: dict[str, Callable[[], Any]] = {}
        self._values: dict[str, _Values] = {}

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

        In `after_train_epoch`, call it before the `logger` hook, whose priority is 60: it then makes the record that
        closes the epoch. A later value is in the next record, and after the last epoch in none.

        Args:
            name: in the record.
            value: of this rank.
            weight: of the value in the mean, such as its number of samples or terms, 0 or more: a number, or a scalar
                tensor on the value's device. The number 0 ignores the value. None: each iteration has the same weight,
                which the ranks share.

        Raises:
            UserError: a tensor has its graph.
        """
        values = self._values.get(name)
        if values is None:
            values = self._values[name] = _Values(name)
        values.add(value, weight)

    def means(self, over: Distributed | None = None) -> dict[str, float]:
        """Return the mean of each name since the last call, and begin again for the next record.

        One host sync for each device that has values, for any number of names. With several ranks, one exchange among
        the hosts.

        Args:
            over: the ranks over which the mean is taken; called on each of them. None: this rank alone. If only some
                ranks have a name, the mean is over these.
        """
        read = self._read()
        self._values.clear()
        means = {name: total / (weight + count) for name, (total, weight, count) in read.items() if weight + count}
        if over is None or over.world_size == 1:
            return means
        return mean_over_ranks(means, over, {name: read[name][1] or 1.0 for name in means})

    def state_dict(self) -> dict[str, list[float]]:
        """Return the sum, weight and count since the last record, without times. One host sync for each device that has
        values."""
        return {name: list(read) for name, read in self._read().items() if name not in _TIMES}

    def load_state_dict(self, states: Sequence[Mapping[str, Sequence[float]] | None], over: Distributed) -> None:
        """Replace the sums by those of the states, so that the next record is as without a stop.

        Args:
            states: of each rank of the saved run. Another number of ranks begins the record again.
            over: the ranks of this run.
        """
        self._values.clear()
        if len(states) != over.world_size:
            return
        for name, (total, weight, count) in (states[over.rank] or {}).items():
            values = self._values.setdefault(name, _Values(name))
            values.total.add(total)
            values.weight.add(weight)
            values.count += count

    def _read(self) -> dict[str, tuple[float, float, float]]:
        """Return the sum, weight and count of each name."""
        pairs = {name: (values.total, values.weight) for name, values in self._values.items()}
        numbers = iter(_read([part for pair in pairs.values() for part in pair]))
        return {name: (next(numbers), next(numbers), self._values[name].count) for name in pairs}


def mean_over_ranks(values: Mapping[str, float], ranks: Distributed, weights: Mapping[str, float]) -> dict[str, float]:
    """Return the weighted mean of each name over the ranks that have it; called on every rank."""
    of_ranks: list[dict[str, tuple[float, float]]] = ranks.gather(
        {name: (value, weights[name]) for name, value in values.items()}
    )
    means = {}
    for name in dict.fromkeys(name for of_rank in (values, *of_ranks) for name in of_rank):
        pairs = [of_rank[name] for of_rank in of_ranks if name in of_rank]
        means[name] = sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)
    return means


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
        check_names([name], TAKEN)
        yield name, value


def position(progress: Progress, mode: Mode) -> dict[str, Any]:
    """Return the first entries of a record: `{"mode", "epoch", "iteration"}`. No host sync.

    `epoch` counts from 1 and includes the current one; `iteration` counts completed ones.
    """
    return {"mode": mode, "epoch": progress.epoch + (progress.batch_in_epoch > 0), "iteration": progress.iteration}


def plain(value: Any) -> Any:
    """Return a scalar of numpy or torch as a plain number; another value as it is.

    Host sync for a tensor on an accelerator.
    """
    return value.item() if getattr(value, "ndim", None) == 0 else value


def as_tensor(values: Any) -> Tensor:
    """Return a tensor without its graph, or a copy of an array or a list of numbers as a tensor."""
    if isinstance(values, Tensor):
        return values.detach()
    return torch.from_numpy(np.array(values, order="C"))  # a copy: torch takes no negative strides


def check_names(names: Iterable[str], reserved: Collection[str] = RESERVED) -> None:
    """Refuse names of metrics and scalars that records already use.

    Raises:
        UserError: a name is reserved.
    """
    for name in names:
        if name in reserved:
            raise UserError(
                f"every record already has an entry {name!r}",
                remedy="Give the metric or scalar of the task or hook another name.",
            )
