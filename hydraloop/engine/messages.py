"""What hooks tell each other: facts read on demand, and scalars averaged over a window without a host sync."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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
        """Add one iteration's value: a float, or a detached scalar tensor, which stays on its device (no host sync)."""
        window = self._windows.get(name)
        if window is None:
            window = self._windows[name] = _Window()
        window.values.append(value)
        if len(window.values) >= _FOLD_AT:
            window.fold()

    def means(self, reduce: Callable[[Tensor], Tensor] = lambda means: means) -> dict[str, float]:
        """The mean of each name over its window, and an empty window for the next record.

        One host sync in all, whatever the number of names, and only where tensors are among them.

        Args:
            reduce: from `[N]` float64 means of this rank to those over all ranks; called on every rank.
        """
        names = [name for name, window in self._windows.items() if window.count or window.values]
        if not names:
            return {}
        totals, counts = [], []
        for name in names:
            window = self._windows.pop(name)
            window.fold()
            totals.append(window.total)
            counts.append(window.count)
        device = next((total.device for total in totals if isinstance(total, Tensor)), torch.device("cpu"))
        stacked = (
            torch.stack(
                [total if isinstance(total, Tensor) else torch.tensor(total, dtype=torch.float64) for total in totals]
            )
            if device.type == "cpu"
            else _stack_on(device, totals)
        )
        means = reduce(stacked / torch.tensor(counts, dtype=stacked.dtype, device=device))
        return dict(zip(names, means.tolist(), strict=True))


class _Window:
    """The values of one name since the last record: a folded sum and count, and those not folded yet."""

    __slots__ = ("count", "total", "values")

    def __init__(self) -> None:
        self.values: list[float | Tensor] = []
        self.total: float | Tensor = 0.0
        self.count = 0

    def fold(self) -> None:
        """Sum the kept values; float64 on the CPU, float32 where the device has nothing else (mps)."""
        tensors = [value for value in self.values if isinstance(value, Tensor)]
        if tensors:
            stacked = torch.stack(tensors)
            wide = torch.float32 if stacked.device.type == "mps" else torch.float64
            self.total = self.total + stacked.sum(dtype=wide)
        self.total = self.total + sum(value for value in self.values if not isinstance(value, Tensor))
        self.count += len(self.values)
        self.values.clear()


def _stack_on(device: torch.device, totals: list[float | Tensor]) -> Tensor:
    """Device totals and host totals in one tensor on the device; the host ones are copied without a sync."""
    wide = torch.float32 if device.type == "mps" else torch.float64
    host = torch.tensor([0.0 if isinstance(total, Tensor) else total for total in totals], dtype=wide)
    if device.type == "cuda":
        host = host.pin_memory()
    stacked = host.to(device, non_blocking=True)
    for index, total in enumerate(totals):
        if isinstance(total, Tensor):
            stacked[index] = total
    return stacked
