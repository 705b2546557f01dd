"""What hooks tell each other: facts read on demand, and scalars averaged over a window without a host sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.errors import UserError

_FOLD_AT = 256
"""Kept tensors of one name before they are summed into one: bounds memory where records are rare."""


class Messages:
    """One per engine. Facts are pulled (`provide`, `read`), so they cost nothing in iterations that nobody looks at.

    Scalars are pushed (`add`) every iteration and reduced to their means when a record is due (`means`).
    """

    def __init__(self) -> None:
        self._facts: dict[str, Callable[[], Any]] = {}
        self._windows: dict[str, _Window] = {}
        self._shared: list[str] = []
        """The names that any rank has had in a record, in an order that all ranks share."""

    # Facts. ----------------------------------------------------------------------------------------------------------

    def provide(self, name: str, read: Callable[[], Any]) -> None:
        """Let `read` answer for the fact `name` (epoch, lr, …) from now on."""
        self._facts[name] = read

    def read(self, name: str, default: Any = None) -> Any:
        """The fact's value now, or `default` where nobody provides it. Host sync only if its provider has one."""
        provider = self._facts.get(name)
        return default if provider is None else provider()

    def facts(self) -> dict[str, Any]:
        """All facts, by name, in the order they were first provided."""
        return {name: read() for name, read in self._facts.items()}

    # Scalars. --------------------------------------------------------------------------------------------------------

    def add(self, name: str, value: float | Tensor) -> None:
        """Add one iteration's value: a float, or a detached scalar tensor, which stays on its device (no host sync).

        Anything else is a `UserError` at the next record: looking at each value here would cost more than adding it.
        """
        window = self._windows.get(name)
        if window is None:
            window = self._windows[name] = _Window(name)
        window.values.append(value)
        if len(window.values) >= _FOLD_AT:
            window.fold()

    def means(self, over: Distributed | None = None) -> dict[str, float]:
        """Return the mean of each name over its window, and begin an empty window for the next record.

        One host sync for each device that has values, whatever the number of names. With several ranks, one exchange
        among the hosts; a record with a name that no rank has had before takes three more.

        Args:
            over: the ranks over which the mean is taken; called on each of them. None: this rank alone. If only some
                ranks have a name, the mean is over these.
        """
        windows = {name: window for name, window in self._windows.items() if window.values or window.count}
        self._windows.clear()
        for window in windows.values():
            window.fold()
        sums = _read([window.sums for window in windows.values()])
        means = {
            name: (window.total + on_devices) / window.count
            for (name, window), on_devices in zip(windows.items(), sums, strict=True)
        }
        return means if over is None or over.world_size == 1 else self._over_ranks(means, over)

    def _over_ranks(self, means: dict[str, float], ranks: Distributed) -> dict[str, float]:
        """Return the mean of each name over the ranks that have it.

        The ranks add up one vector: how many of them have a name that is not in `self._shared`, and for each shared
        name how many have it and the sum of their means. It has the same layout on all ranks, because `self._shared`
        only ever changes on all ranks at once, by what they have gathered.
        """
        while True:
            shared = self._shared
            unknown = float(not means.keys() <= set(shared))
            row = [unknown, *(float(name in means) for name in shared), *(means.get(name, 0.0) for name in shared)]
            unknown, *sums = ranks.sum(torch.tensor(row, dtype=torch.float64)).tolist()
            if not unknown:
                break
            self._shared = sorted({*shared, *(name for names in ranks.gather(list(means)) for name in names)})
        ranks_with, totals = sums[: len(shared)], sums[len(shared) :]
        over_all = {name: total / count for name, count, total in zip(shared, ranks_with, totals, strict=True) if count}
        return {name: over_all[name] for name in dict.fromkeys([*means, *over_all])}


def _read(sums: list[dict[torch.device, Tensor]]) -> list[float]:
    """Return the total of each entry as a number; one host sync for each device."""
    totals = [0.0] * len(sums)
    for device in {device for entry in sums for device in entry}:
        having = [index for index, entry in enumerate(sums) if device in entry]
        for index, number in zip(having, torch.stack([sums[index][device] for index in having]).tolist(), strict=True):
            totals[index] += number
    return totals


class _Window:
    """The values of one name since the last record: folded sums and a count, and the values not folded yet."""

    __slots__ = ("count", "name", "sums", "total", "values")

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[float | Tensor] = []
        self.total = 0.0
        """The sum of the plain numbers."""
        self.sums: dict[torch.device, Tensor] = {}
        """The sum of the tensors of each device, on that device."""
        self.count = 0

    def fold(self) -> None:
        """Add the kept values to the sums, in float64, or in float32 on mps, which has no float64. No host sync.

        Raises:
            UserError: a value is not a number or a scalar tensor, or still has its graph.
        """
        by_device: dict[torch.device, list[Tensor]] = {}
        for value in self.values:
            if isinstance(value, Tensor):
                by_device.setdefault(value.device, []).append(self._scalar(value))
            else:
                self.total += self._number(value)
        for device, tensors in by_device.items():
            stacked = torch.stack(tensors)
            if stacked.requires_grad:
                raise UserError(
                    f"a hook or task adds {self.name!r} to engine.messages with its graph, and keeps all activations",
                    remedy=f"Add the value's .detach(): engine.messages.add({self.name!r}, value.detach()).",
                )
            folded = stacked.sum(dtype=torch.float32 if device.type == "mps" else torch.float64)
            self.sums[device] = self.sums[device] + folded if device in self.sums else folded
        self.count += len(self.values)
        self.values.clear()

    def _scalar(self, value: Tensor) -> Tensor:
        if not value.ndim:
            return value
        if value.numel() == 1:
            return value.reshape(())
        raise self._no_number(f"a tensor of the shape {list(value.shape)}")

    def _number(self, value: float) -> float:
        try:
            return float(value)
        except (TypeError, ValueError):
            raise self._no_number(repr(value)) from None

    def _no_number(self, got: str) -> UserError:
        return UserError(
            f"a hook or task adds {self.name!r} to engine.messages, and it is {got}",
            remedy="Add a number or a tensor with one entry, a mean for example.",
        )
