"""What the hook `param_scheduler` uses of a schedule, which is one of `hydraloop.optim`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class GroupNumber(Protocol):
    """A number in a parameter group that schedules change."""

    def write(self, value: float) -> None:
        """Set the number. No host sync."""


class Schedule(Protocol):
    """A `hydraloop.optim.Schedule` or `TorchSchedule`."""

    key: str
    order: int
    by_epoch: bool
    monitor: str | None
    mode: str | None

    def apply(self, values: dict[GroupNumber, float], optimizer_step: int, epoch: int) -> None:
        """Change the values of this step."""

    def step(self) -> None:
        """Take a step, if the schedule counts its own steps."""

    def observe(self, metrics: Mapping[str, float], optimizer_step: int, epoch: int) -> None:
        """Follow the metrics of a validation."""
