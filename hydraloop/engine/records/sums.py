"""Sums of logged values, numbers and tensors, that stay on their devices until a record reads them."""

from __future__ import annotations

import torch
from torch import Tensor

from hydraloop.errors import UserError

_FOLD_AT = 256
"""Values of one name that are kept before they are summed. This bounds the memory if records are rare."""


def read_sums(sums: list[Sum]) -> list[float]:
    """Return each sum as a number; one host sync for each device."""
    totals = [one.number for one in sums]
    for device in {device for one in sums for device in one.tensors}:
        having = [index for index, one in enumerate(sums) if device in one.tensors]
        stacked = torch.stack([sums[index].tensors[device] for index in having])
        for index, number in zip(having, stacked.tolist(), strict=True):
            totals[index] += number
    return totals


def _wide(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on mps, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


class Sum:
    """A sum of numbers, and of tensors on each device."""

    __slots__ = ("number", "tensors")

    def __init__(self) -> None:
        self.number = 0.0
        self.tensors: dict[torch.device, Tensor] = {}

    def add(self, value: float | Tensor) -> None:
        """Add a number or a scalar tensor. No host sync."""
        if not isinstance(value, Tensor):
            self.number += value
            return
        device = value.device
        value = value.to(_wide(device))
        self.tensors[device] = self.tensors[device] + value if device in self.tensors else value


class Values:
    """The values of one name since the last record: sums, and the values not yet folded into them."""

    __slots__ = ("count", "name", "total", "unit", "values", "weight")

    def __init__(self, name: str) -> None:
        self.name = name
        self.values: list[float | Tensor] = []
        self.unit: float | None = None
        """The weight that all of `values` have."""
        self.total = Sum()
        """The values times their weights."""
        self.weight = Sum()
        """The weights."""
        self.count = 0.0
        """The number of values without a weight."""

    def add(self, value: float | Tensor, weight: float | Tensor | None) -> None:
        """Add a value. No host sync."""
        if isinstance(weight, Tensor):  # to compare it would be a host sync
            self.fold()
            self.values.append(value)
            self.fold(weight.detach().reshape(()))
        elif weight != 0:  # the loss of a filler batch may be NaN
            if weight != self.unit or len(self.values) >= _FOLD_AT - 1:
                self.fold()
            self.unit = weight
            self.values.append(value)

    def fold(self, weight: Tensor | None = None) -> None:
        """Add the kept values to the sums. No host sync.

        Args:
            weight: of each of them; None: `unit`.

        Raises:
            UserError: a value is not a number or a scalar tensor, or a tensor has its graph.
        """
        by_device: dict[torch.device, list[Tensor]] = {}
        numbers = 0.0
        for value in self.values:
            if isinstance(value, Tensor):
                if value.numel() != 1:
                    raise self._not_a_number(f"a tensor of the shape {list(value.shape)}")
                by_device.setdefault(value.device, []).append(value.reshape(()) if value.ndim else value)
                continue
            try:
                numbers += float(value)
            except (TypeError, ValueError):
                raise self._not_a_number(repr(value)) from None
        times = self.unit if weight is None else weight
        factor = 1.0 if times is None else times
        if numbers:
            self.total.add(numbers * factor)
        for device, tensors in by_device.items():
            stacked = torch.stack(tensors)
            if stacked.requires_grad:
                raise UserError(
                    f"a hook or task adds {self.name!r} to engine.messages with its graph, and keeps all activations",
                    remedy=f"Add the value's .detach(): engine.messages.add({self.name!r}, value.detach()).",
                )
            self.total.add(stacked.sum(dtype=_wide(device)) * factor)
        if times is None:
            self.count += len(self.values)
        else:
            self.weight.add(times * len(self.values))
        self.values.clear()

    def _not_a_number(self, got: str) -> UserError:
        return UserError(
            f"a hook or task adds {self.name!r} to engine.messages, and it is {got}",
            remedy="Add a number or a tensor with one entry, a mean for example.",
        )
