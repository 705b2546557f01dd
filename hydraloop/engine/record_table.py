"""Records as the lines of a table. Plain text; does not synchronize with the device."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydraloop.errors import printable
from hydraloop.files.terminal import clock, duration, number, rate

_ROWS = 20
"""Lines after which the header is repeated: it then stays visible in a terminal of 24 lines."""
_GAP = 2
_NOTE = _GAP + len("best")
_MEASURES: dict[str, tuple[str, int, Callable[[Any], str]]] = {
    "lr": ("lr", 7, lambda value: f"{value:.1e}"),
    "eta": ("eta", 7, clock),
    "time": ("time", 7, duration),
    "data_time": ("data", 7, duration),
    "samples_per_second": ("samples/s", 9, rate),
    "memory": ("memory", 7, lambda value: f"{value:.0f}MiB" if value < 10_000 else f"{value / 1024:.1f}GiB"),
    "skipped": ("skipped", 7, str),
}
"""By entry: header, width and format of the columns that every training can have, in their order."""
_MOST_LRS = 4
"""Columns of further lrs (`lr/generator`); with more, as with `layer_decay`, they are only in the records."""
_NUMBER_WIDTH = 8
_NOT_SHOWN = frozenset({"mode", "epoch", "iteration", "momentum"})
"""Entries without such a column: those at the start of each line, and momentum, which is seldom scheduled."""


def terminal_width() -> int | None:
    """Return the number of columns of the terminal; None if the output goes to a file or another program."""
    return (shutil.get_terminal_size((0, 0)).columns or None) if sys.stdout.isatty() else None


class RecordTable:
    """Formats records as lines with aligned columns, numbers to the right.

    Training, validation and test share the columns; an entry that a record does not have leaves its cell empty. A name
    that no record has had before adds a column. Columns that do not fit into `width` are left out, and the header ends
    with `…`. The loss, the first metric and the measures (`lr`, `eta`, …) are kept first.

    Args:
        max_epochs: of the run.
        max_iters: of the run.
        metrics: names that validations will have: their columns are there from the start.
        width: of the terminal, in columns; None: unlimited.
    """

    def __init__(
        self, max_epochs: int, max_iters: int, metrics: Sequence[str] = (), *, width: int | None = None
    ) -> None:
        self._max_epochs, self._max_iters = max_epochs, max_iters
        self._metrics, self._width = tuple(metrics), width
        self._names: list[str] = list(metrics)
        self._columns: list[str] = []
        """Those of `_names` that are shown, in their order."""
        self._until_header = 0

    def header(self, record: Mapping[str, Any]) -> str | None:
        """Return the header if it is printed before this record's line: every 20 lines, and for new columns."""
        lrs = [name for name in record if name.startswith("lr/")]
        hidden = {*_NOT_SHOWN, *(lrs if len(lrs) > _MOST_LRS else ())}
        self._names += [name for name in record if name not in self._names and name not in hidden]
        before, self._columns = self._columns, self._fitting()
        self._until_header -= 1
        if self._columns == before and self._until_header >= 0:
            return None
        self._until_header = _ROWS - 1
        titles = [_MEASURES[name][0] if name in _MEASURES else name for name in self._columns]
        line = self._line("", "epoch", "iter", titles) + ("  …" if len(self._columns) < len(self._names) else "")
        return printable(line)  # a name may come from data

    def line(self, record: Mapping[str, Any], note: str = "") -> str:
        """Return the record's line, with a note at its end."""
        line = self._line(
            str(record["mode"]),
            f"{record['epoch']}/{self._max_epochs}",
            f"{record['iteration']}/{self._max_iters}",
            [_cell(name, record) for name in self._columns],
        )
        return f"{line}  {note}" if note else line

    def _line(self, mode: str, epoch: str, iteration: str, cells: Sequence[str]) -> str:
        padded = (f"{cell:>{_width_of(name) + _GAP}}" for name, cell in zip(self._columns, cells, strict=True))
        return (self._position(mode, epoch, iteration) + "".join(padded)).rstrip()

    def _position(self, mode: str, epoch: str, iteration: str) -> str:
        epochs, iters = (2 * len(str(most)) + 1 for most in (self._max_epochs, self._max_iters))
        return f"{mode:<5}{epoch:>{max(epochs, len('epoch')) + _GAP}}{iteration:>{max(iters, len('iter')) + _GAP}}"

    def _fitting(self) -> list[str]:
        """Return the names that fit, as columns: the measures, scalars of hooks, the loss, other losses, metrics."""
        measures = list(_MEASURES)

        def place(name: str) -> tuple[int, int]:
            if name in _MEASURES or name.startswith("lr/"):
                return 0, measures.index(name.partition("/")[0])
            return (2, 0) if name == "loss" else (3, 0) if "loss" in name else (4 if name in self._metrics else 1, 0)

        names = sorted(self._names, key=place)
        if self._width is None:
            return names
        first = ("loss", *self._metrics[:1], *measures, *self._metrics)
        room, kept = self._width - _NOTE - len(self._position("", "", "")), set()
        for name in sorted(names, key=lambda name: first.index(name) if name in first else len(first)):
            room -= _width_of(name) + _GAP
            if room < 0:
                break
            kept.add(name)
        return [name for name in names if name in kept]


def _width_of(name: str) -> int:
    return _MEASURES[name][1] if name in _MEASURES else max(_NUMBER_WIDTH, len(name))


def _cell(name: str, record: Mapping[str, Any]) -> str:
    if name not in record:
        return ""
    measure = "lr" if name.startswith("lr/") else name
    if record["mode"] == "train" and measure in _MEASURES:  # a metric may have the same name
        return _MEASURES[measure][2](record[name])
    text = number(record[name])
    fits = len(text) < _width_of(name) + _GAP or not isinstance(record[name], int | float)
    return text if fits else f"{record[name]:.2e}"  # a negative number with an exponent
