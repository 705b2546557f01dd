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

    def means(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """The mean of each name over its window, and an empty window for the next record.

        One host sync in all, whatever the number of names, and only where tensors are among them (or ranks to reduce
        over).

        Args:
            reduce: from `[N]` sums of this rank to their mean over all ranks, called once, on every rank; None where
                there is one rank only. Ranks count the same iterations.
        """
        windows = {name: window for name, window in self._windows.items() if window.values or window.count}
        self._windows.clear()
        for window in windows.values():
            window.fold()
        on_device = [name for name, window in windows.items() if isinstance(window.total, Tensor)]
        sums: dict[str, float] = {
            name: window.total for name, window in windows.items() if not isinstance(window.total, Tensor)
        }
        if on_device or (reduce is not None and sums):
            vector = _vector([windows[name].total for name in on_device], list(sums.values()) if reduce else [])
            reached = (vector if reduce is None else reduce(vector)).tolist()
            sums.update(zip([*on_device, *(sums if reduce else ())], reached, strict=True))
        return {name: sums[name] / window.count for name, window in windows.items()}


class _Window:
    """The values of one name since the last record: a folded sum and count, and those not folded yet."""

    __slots__ = ("count", "total", "values")

    def __init__(self) -> None:
        self.values: list[float | Tensor] = []
        self.total: float | Tensor = 0.0
        self.count = 0

    def fold(self) -> None:
        """Sum the kept values; tensors in float64, or float32 where the device has nothing wider (mps)."""
        tensors = [value for value in self.values if isinstance(value, Tensor)]
        if tensors:
            stacked = torch.stack(tensors)
            folded = stacked.sum(dtype=torch.float32 if stacked.device.type == "mps" else torch.float64)
            self.total = folded if isinstance(self.total, float) and not self.total else self.total + folded
        if len(tensors) < len(self.values):
            self.total = self.total + sum(value for value in self.values if not isinstance(value, Tensor))
        self.count += len(self.values)
        self.values.clear()


def _vector(totals: list[float | Tensor], floats: list[float]) -> Tensor:
    """Device totals, then host ones, as one tensor on the device; the host ones are copied without a sync."""
    tensors = [total for total in totals if isinstance(total, Tensor)]
    if not tensors:
        return torch.tensor(floats, dtype=torch.float64)
    vector = torch.stack(tensors)
    if not floats:
        return vector
    host = torch.tensor(floats, dtype=vector.dtype, pin_memory=vector.device.type == "cuda")
    return torch.cat([vector, host.to(vector.device, non_blocking=True)])
