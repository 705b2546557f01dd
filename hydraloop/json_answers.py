"""Answers in JSON for scripts and agents, with `--json`: one document on standard output. Imports no torch.

`docs/reference/json.md` describes the documents.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TextIO

from hydraloop.errors import UserError
from hydraloop.run_files.config_yaml import plain
from hydraloop.run_files.result import describe
from hydraloop.safety.secrets import masked

FLAG = "--json"
SCHEMA = 1
"""The version of the documents. It is raised when a key is removed or changes its meaning, not when one is added."""


@dataclass
class _Asked:
    """A command with `--json`."""

    out: TextIO
    """What was standard output."""
    is_answered: bool = False


_asked: _Asked | None = None


def wanted(argv: Sequence[str]) -> bool:
    """Return whether a command line asks for JSON, also by an abbreviation that argparse accepts."""
    return any(len(word) > 3 and FLAG.startswith(word) for word in argv)


def asked() -> bool:
    """Return whether the running command has `--json`."""
    return _asked is not None


@contextmanager
def reserved(argv: Sequence[str]) -> Iterator[None]:
    """With `--json`, only `write` and `write_error` write to standard output in the body, and one of them does.

    All other output goes to standard error, that of other libraries and of processes that are started, too.

    Args:
        argv: the arguments.
    """
    global _asked
    if not wanted(argv) or _asked is not None:  # a command may call another one
        yield
        return
    before = out = sys.stdout
    if before is sys.__stdout__:  # not replaced in this process, as by `contextlib.redirect_stdout`
        sys.stdout.flush()
        out = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)
    sys.stdout, _asked = sys.stderr, _Asked(out)
    try:
        yield
    finally:
        if not _asked.is_answered:
            write(argv[0], {"answer": None})
        if out is not before:
            os.dup2(out.fileno(), 1)
            out.close()
        sys.stdout, _asked = before, None


def hand_over() -> None:
    """Let the processes that this one starts, or that it has forked, write the answer."""
    if _asked is not None:
        os.dup2(_asked.out.fileno(), 1)
        _asked.is_answered = True


def forget() -> None:
    """Answer nothing in the fork that runs jobs of a sweep: the sweep answers."""
    global _asked
    _asked = None


def write(command: str, content: Mapping[str, Any]) -> None:
    """Print an answer.

    Args:
        command: that was called.
        content: configs, dicts, lists, texts and numbers. Secrets are masked; NaN and infinity become their names, and
            other objects, such as paths, their texts.
    """
    _print({"schema": SCHEMA, "command": command, **content})


def write_error(error: BaseException) -> None:
    """Print an error that ends a command, with `--json`."""
    if _asked is None:
        return
    problem = error.problem if isinstance(error, UserError) else describe(error)
    content = {"key": getattr(error, "key", None), "problem": problem, "remedy": getattr(error, "remedy", None)}
    _print({"schema": SCHEMA, "error": content})


def _print(document: Mapping[str, Any]) -> None:
    out = sys.stdout
    if _asked is not None:
        out, _asked.is_answered = _asked.out, True
    print(json.dumps(masked(plain(document)), default=str, allow_nan=False), file=out, flush=True)
