"""Records as the lines of a table. Plain text; does not synchronize with the device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydraloop.engine.report.summary import clock, duration, number

_ROWS = 20
"""Lines after which the header is repeated: it then stays visible in a terminal of 24 lines."""
_GAP = 2
_MEASURES: dict[str, tuple[str, int, Callable[[Any], str]]] = {
    "lr": ("lr", 7, lambda value: f"{value:.1e}"),
    "eta": ("eta", 7, clock),
    "time": ("time", 7, duration),
    "data_time": ("data", 7, duration),
    "memory": ("memory", 7, lambda value: f"{value:.0f}MiB" if value < 10_000 else f"{value / 1024:.1f}GiB"),
    "mfu": ("mfu", 5, lambda value: f"{value:.1%}"),
    "skipped": ("skipped", 7, str),
}
"""By entry: header, width and format of the columns that every training can have, in their order."""
_NUMBER_WIDTH = 8
_NOT_SHOWN = frozenset({"mode", "epoch", "iteration", "momentum"})
"""Entries without such a column: those at the start of each line, and momentum, which is seldom scheduled."""


class RecordTable:
    """Formats records as lines with aligned columns, numbers to the right.

    Training, validation and test share the columns; an entry that a record does not have leaves its cell empty. A name
    that no record has had before adds a column.

    Args:
        max_epochs: of the run.
        max_iters: of the run.
        metrics: names that validations will have: their columns are there from the start.
    """

    def __init__(self, max_epochs: int, max_iters: int, metrics: Sequence[str] = ()) -> None:
        self._max_epochs, self._max_iters = max_epochs, max_iters
        self._metrics = frozenset(metrics)
        self._names = self._in_order(metrics)
        self._until_header = 0

    def header(self, record: Mapping[str, Any]) -> str | None:
        """Return the header if one has to stand before this record's line: after 20 lines, and for new columns."""
        new = [name for name in record if name not in self._names and name not in _NOT_SHOWN]
        self._until_header -= 1
        if not new and self._until_header >= 0:
            return None
        self._names = self._in_order([*self._names, *new])
        self._until_header = _ROWS - 1
        return self._line("", "epoch", "iter", [self._title(name) for name in self._names])

    def line(self, record: Mapping[str, Any], note: str = "") -> str:
        """Return the record's line, with a note at its end."""
        line = self._line(
            str(record["mode"]),
            f"{record['epoch']}/{self._max_epochs}",
            f"{record['iteration']}/{self._max_iters}",
            [_cell(name, record) for name in self._names],
        )
        return f"{line}  {note}" if note else line

    def _line(self, mode: str, epoch: str, iteration: str, cells: Sequence[str]) -> str:
        epochs, iters = (2 * len(str(most)) + 1 for most in (self._max_epochs, self._max_iters))
        columns = [(epoch, max(epochs, len("epoch"))), (iteration, max(iters, len("iter")))]
        for name, cell in zip(self._names, cells, strict=True):
            columns.append((cell, _MEASURES[name][1] if name in _MEASURES else max(_NUMBER_WIDTH, len(name))))
        return (f"{mode:<5}" + "".join(f"{cell:>{width + _GAP}}" for cell, width in columns)).rstrip()

    def _title(self, name: str) -> str:
        return _MEASURES[name][0] if name in _MEASURES else name

    def _in_order(self, names: Sequence[str]) -> list[str]:
        """Return the names as columns: lr, time and so on, scalars of hooks, the loss, other losses, metrics."""
        measures = list(_MEASURES)

        def place(name: str) -> tuple[int, int]:
            if name in _MEASURES:
                return 0, measures.index(name)
            return (2, 0) if name == "loss" else (3, 0) if "loss" in name else (4 if name in self._metrics else 1, 0)

        return sorted(names, key=place)


def _cell(name: str, record: Mapping[str, Any]) -> str:
    if name not in record:
        return ""
    if record["mode"] == "train" and name in _MEASURES:  # a metric may have the same name
        return _MEASURES[name][2](record[name])
    return number(record[name])
