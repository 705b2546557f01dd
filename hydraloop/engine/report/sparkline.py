"""Sparklines: the losses of a run as one line of text each. Imports no torch."""

from __future__ import annotations

import locale
import math
import sys
from pathlib import Path

from hydraloop.engine.report.formats import number
from hydraloop.run_files.record_log import read_some

_BLOCKS = "▁▂▃▄▅▆▇█"
_WIDTH = 40
"""Columns, at most."""


def losses(log: Path) -> str:
    """Return a line for the loss of training, and one for that of validation, with the first and the last value.

    Empty if the terminal or the log file cannot show the blocks, or if there are fewer than two losses of each.

    Args:
        log: the record log, of any length.
    """
    found: dict[str, list[float]] = {}
    for record in read_some(log, _WIDTH) if _is_shown() else ():
        if record.mode != "test" and "loss" in record.values:
            found.setdefault(record.mode, []).append(record.values["loss"])
    finite = [value for values in found.values() for value in values if math.isfinite(value)]
    return "\n".join(
        f"{_line(values, min(finite), max(finite))} {mode}, {number(values[0])} to {number(values[-1])}"
        for mode, values in found.items()
        if len(values) > 1 and finite
    )


def _is_shown() -> bool:
    encodings = (getattr(sys.stdout, "encoding", None) or "utf-8", locale.getencoding())
    try:
        return all(_BLOCKS.encode(one) for one in encodings)
    except (UnicodeEncodeError, LookupError):
        return False


def _line(values: list[float], low: float, high: float) -> str:
    """Return a block for each value. NaN and infinity are spaces."""
    scale = (len(_BLOCKS) - 1) / (high - low) if high > low else 0.0
    kept = values[-_WIDTH:]
    return "".join(_BLOCKS[round((one - low) * scale)] if math.isfinite(one) else " " for one in kept)
