"""The interval rule: logging, validation, checkpoints, averaging and profiling all use `Every`."""

from __future__ import annotations

from dataclasses import dataclass

from hydraloop.errors import UserError


@dataclass(frozen=True, slots=True)
class Every:
    """Fires at `n >= begin` with `(n - begin) % interval == 0`, where n counts from 1.

    Args:
        interval: in the unit that the caller counts (epochs, iterations, optimizer steps), 1 or more; None means never.
        begin: the first n at which it may fire; 0 and 1 both mean "from the start": `Every(5)` fires at 5, 10, 15.

    Raises:
        UserError: an interval below 1, a negative begin, or a value that is not a whole number.
    """

    interval: int | None
    begin: int = 0

    def __post_init__(self) -> None:
        for name, value in (("interval", self.interval), ("begin", self.begin)):
            if value is not None and not isinstance(value, int):
                raise UserError(f"{name} {value!r} is not a whole number", remedy="Use 1, 2, 3 and so on.")
        if self.interval is not None and self.interval < 1:
            raise UserError(f"interval {self.interval} is below 1", remedy="Use 1 or more, or null for never.")
        if self.begin < 0:
            raise UserError(f"begin {self.begin} is negative", remedy="Use 0 to begin at the start.")

    def fires_at(self, n: int) -> bool:
        """Return whether it fires at n, counted from 1."""
        if self.interval is None or n < 1:
            return False
        if self.begin <= 1:
            return n % self.interval == 0
        return n >= self.begin and (n - self.begin) % self.interval == 0

    def times_until(self, n: int) -> int:
        """Return how many times it fires from 1 to n. Compare two of them to know whether it fired in between."""
        if self.interval is None or n < self.begin:
            return 0
        return n // self.interval if self.begin <= 1 else 1 + (n - self.begin) // self.interval
