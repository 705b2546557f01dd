"""The one interval rule: logging, validation, checkpoints, averaging and profiling all ask `Every`."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral

from hydraloop.errors import UserError


@dataclass(frozen=True, slots=True)
class Every:
    """Due at `n >= begin` with `(n - begin) % interval == 0`, where n counts from 1.

    Args:
        interval: in whatever the caller counts (epochs, iterations, optimizer steps), at least 1; None means never.
        begin: the first n that may be due; 0 and 1 both mean "from the start", so that `Every(5)` is due at 5, 10, 15.

    Raises:
        UserError: an interval below 1, a negative begin, or one that is no whole number.
    """

    interval: int | None
    begin: int = 0

    def __post_init__(self) -> None:
        for name, value in (("interval", self.interval), ("begin", self.begin)):
            if value is not None and not isinstance(value, (int, Integral)):
                raise UserError(f"{name} {value!r} is not a whole number", remedy="Use 1, 2, 3 and so on.")
        if self.interval is not None and self.interval < 1:
            raise UserError(f"interval {self.interval} is below 1", remedy="Use 1 or more, or null for never.")
        if self.begin < 0:
            raise UserError(f"begin {self.begin} is negative", remedy="Use 0 to begin at the start.")

    def due(self, n: int) -> bool:
        """Whether the n-th (counted from 1) is due."""
        if self.interval is None or n < 1:
            return False
        if self.begin <= 1:
            return n % self.interval == 0
        return n >= self.begin and (n - self.begin) % self.interval == 0

    def due_since(self, seen: int, n: int) -> bool:
        """Whether one of those after `seen` up to the n-th is due."""
        return self._up_to(n) > self._up_to(seen)

    def _up_to(self, n: int) -> int:
        """How many of the first n are due."""
        if self.interval is None or n < self.begin:
            return 0
        return n // self.interval if self.begin <= 1 else 1 + (n - self.begin) // self.interval
