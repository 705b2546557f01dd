"""Answers in JSON for scripts and agents, with `--json`: one document on standard output. Imports no torch.

`docs/reference/json.md` describes the documents.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TextIO

from hydraloop.run_files.config_yaml import plain
from hydraloop.safety.secrets import masked

FLAG = "--json"
SCHEMA = 1
"""The version of the documents. It is raised when a key is removed or changes its meaning, not when one is added."""

_out: TextIO | None = None
"""Standard output, while it is `reserved`."""


def wanted(argv: Sequence[str]) -> bool:
    """Return whether a command line asks for JSON, also by an abbreviation that argparse accepts."""
    return any(len(word) > 3 and FLAG.startswith(word) for word in argv)


@contextmanager
def reserved(argv: Sequence[str]) -> Iterator[None]:
    """With `--json`, only `write` writes to standard output in the body.

    All other output goes to standard error, that of other libraries and of processes that are started, too.
    """
    global _out
    if not wanted(argv):
        yield
        return
    before, copy = sys.stdout, -1
    if before is sys.__stdout__:  # not replaced in this process, as by `contextlib.redirect_stdout`
        sys.stdout.flush()
        copy = os.dup(1)
        os.dup2(2, 1)
    _out = before if copy < 0 else os.fdopen(os.dup(copy), "w", encoding="utf-8")
    sys.stdout = sys.stderr
    try:
        yield
    finally:
        sys.stdout, _out = before, None
        if copy >= 0:
            os.dup2(copy, 1)
            os.close(copy)


def write(command: str, content: Mapping[str, Any]) -> None:
    """Print an answer.

    Args:
        command: that was called.
        content: configs, dicts, lists, texts and numbers. Secrets are masked; NaN and infinity become their names, and
            other objects, such as paths, their texts.
    """
    _print({"schema": SCHEMA, "command": command, **content})


def _print(document: Mapping[str, Any]) -> None:
    print(json.dumps(masked(plain(document)), default=str, allow_nan=False), file=_out or sys.stdout, flush=True)
