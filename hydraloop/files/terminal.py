"""What this process prints: JSON, numbers and durations as text, and signs that the terminal does not have."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Mapping
from io import TextIOWrapper
from math import isfinite
from pathlib import Path
from typing import Any

from hydraloop.errors import printable
from hydraloop.files.config_yaml import plain
from hydraloop.files.secrets import masked


def show(text: str) -> None:
    """Print a text that may come from anywhere. If the reader takes only a part (`| head`), the process just ends."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    print(printable(text))


def print_json(content: Mapping[str, Any]) -> None:
    """Print the answer of a command with `--json`: one document on standard output.

    Args:
        content: configs, dicts, lists, texts and numbers. Secrets are masked; NaN and infinity become their names, and
            other objects, such as paths, their texts.
    """
    print(json.dumps(masked(plain(content)), default=str, allow_nan=False), flush=True)


def replace_unencodable() -> None:
    """Print a question mark for each sign that the encoding of standard output does not have (ASCII, Latin-1).

    Called at the start of each process. By default, Python raises an error. Standard error shows such signs as `\\xf6`.
    """
    if isinstance(sys.stdout, TextIOWrapper):  # not that of a notebook
        sys.stdout.reconfigure(errors="replace")


def write_utf8() -> None:
    """Print UTF-8 from now on, because standard output and standard error are log files."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors="replace", line_buffering=True)


def print_to(log: Path) -> int:
    """Append what this process and its children print to a log file, as UTF-8. Return the length that it had [bytes].

    Raises:
        OSError: the file cannot be opened.
    """
    with log.open("ab") as file:
        for stream, number in ((sys.stdout, 1), (sys.stderr, 2)):
            stream.flush()
            os.dup2(file.fileno(), number)
        write_utf8()
        return file.tell()


_LONG = re.compile(r"(?<![\w.])\d+\.\d{8,}(?:e[+-]?\d+)?(?![\w.])")
"""A number that was computed, not typed: with 8 or more decimals."""
_UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))


def number(value: object) -> str:
    """Return a number with 4 significant digits: `0.1234`, `12.35`, `1.235e-05`, `nan`; other values as they are."""
    if not isinstance(value, float) or not isfinite(value) or value == 0:
        return str(value)
    return f"{value:#.4g}".rstrip(".") if 1e-3 <= abs(value) < 1e4 else f"{value:.3e}"


def brief(text: str) -> str:
    """Return a text with at most 4 significant digits of each long number: `optimizer.lr=0.01153`."""
    return _LONG.sub(lambda found: f"{float(found[0]):.4g}", text)


def rate(per_second: float) -> str:
    """Return a rate with at least 3 significant digits and no exponent: `0.54`, `23.1`, `1254`."""
    return f"{per_second:.0f}" if per_second >= 100 else f"{per_second:.3g}"


def in_bytes(size: int) -> str:
    """Return a number of bytes in a fitting unit: `0.5 KiB`, `12.0 MiB`."""
    unit, name = next(((unit, name) for unit, name in _UNITS if size >= unit), _UNITS[-1])
    return f"{size / unit:.1f} {name}"


def duration(seconds: float) -> str:
    """Return seconds in a fitting unit: `85µs`, `4.2ms`, `302ms`, `1.23s`, `0:04:10`."""
    if seconds < 1e-3:
        return f"{seconds * 1e6:.0f}µs"
    if seconds < 1:
        return f"{seconds * 1e3:.{1 if seconds < 0.1 else 0}f}ms"
    return f"{seconds:.2f}s" if seconds < 100 else clock(seconds)


def clock(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds: `0:00:04`, `26:03:04`."""
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"
