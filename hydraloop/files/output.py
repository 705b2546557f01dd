"""What this process prints: answers in JSON, signs that the terminal does not have, and output that goes to a log."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any

from hydraloop.files.config_yaml import plain
from hydraloop.files.secrets import masked


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
