"""What hooks tell each other: facts read on demand, and scalars averaged over a window without a host sync."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hydraloop.engine.distributed import Distributed
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
        """The mean of each name over its window, and an empty window for the next record.

        One host sync in all, whatever the number of names, and only where tensors are among them; with several ranks
        one exchange among the hosts.

        Args:
            over: the ranks to take the mean over, called on each of them; None: this rank's own. Of a name that only
                some ranks have, it is theirs.
        """
        windows = {name: window for name, window in self._windows.items() if window.values or window.count}
        self._windows.clear()
        for window in windows.values():
            window.fold()
        sums = {name: window.total for name, window in windows.items()}
        on_device = {name: total for name, total in sums.items() if isinstance(total, Tensor)}
        if on_device:
            sums.update(zip(on_device, torch.stack(list(on_device.values())).tolist(), strict=True))
        means = {name: float(sums[name]) / window.count for name, window in windows.items()}
        return means if over is None or over.world_size == 1 else _over_ranks(means, over)


_SLOTS = 128
"""Numbers exchanged at once: all ranks have to send as many, also where one has a name more than the others."""


def _over_ranks(means: dict[str, float], ranks: Distributed) -> dict[str, float]:
    """The means over all ranks, in one exchange where all have the same names.

    That they have is seen from a hash h of the names that is exchanged along: of n ranks n * sum(h^2) = sum(h)^2 only
    where all h are equal (Cauchy and Schwarz). It has 16 bits, with which the sums are exact.
    """
    names = sorted(means)
    h = zlib.crc32("\n".join(names).encode()) % 2**16
    vector = torch.zeros(-(-(2 + len(names)) // _SLOTS) * _SLOTS, dtype=torch.float64)
    vector[: 2 + len(names)] = torch.tensor([h, h * h, *(means[name] for name in names)], dtype=torch.float64)
    sum_h, sum_h2, *sums = ranks.sum(vector).tolist()
    if ranks.world_size * int(sum_h2) == int(sum_h) ** 2:
        over_all = dict(zip(names, (total / ranks.world_size for total in sums), strict=False))
        return {name: over_all[name] for name in means}
    told: list[dict[str, float]] = ranks.gather(means)
    reported = {name: [one[name] for one in told if name in one] for one in told for name in one}
    return {name: sum(values) / len(values) for name, values in reported.items()}


class _Window:
    """The values of one name since the last record: a folded sum and count, and those not folded yet."""

    __slots__ = ("count", "name", "total", "values")

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[float | Tensor] = []
        self.total: float | Tensor = 0.0
        self.count = 0

    def fold(self) -> None:
        """Sum the kept values; tensors in float64, or float32 where the device has nothing wider (mps).

        Raises:
            UserError: a value is no number, no scalar, or still has its graph.
        """
        tensors = [value for value in self.values if isinstance(value, Tensor)]
        if tensors:
            stacked = torch.stack([self._scalar(value) for value in tensors])
            if stacked.requires_grad:
                raise UserError(
                    f"a hook or task adds {self.name!r} to engine.messages with its graph, and keeps all activations",
                    remedy=f"Add the value's .detach(): engine.messages.add({self.name!r}, value.detach()).",
                )
            folded = stacked.sum(dtype=torch.float32 if stacked.device.type == "mps" else torch.float64)
            self.total = folded if isinstance(self.total, float) and not self.total else self.total + folded
        if len(tensors) < len(self.values):
            self.total = self.total + sum(self._number(value) for value in self.values if not isinstance(value, Tensor))
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
