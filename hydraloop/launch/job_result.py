"""Ended: how a run ended, for the process that started it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from hydraloop.launch.outcome import Outcome


@dataclass(frozen=True, slots=True)
class Ended:
    """How a run ended."""

    value: float | None = None
    """What a sweep optimises."""
    error: BaseException | None = None
    """What the job is to raise."""
    trained: bool = True
    """Whether it completed an iteration."""

    @classmethod
    def of(cls, outcome: Outcome) -> Self:
        """As a rank has it."""
        return cls(outcome.value, outcome.error(), outcome.trained)
