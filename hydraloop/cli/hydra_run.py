"""Handing a checked command line to Hydra, with its errors coming back as exceptions."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

import hydra
from omegaconf import DictConfig

from hydraloop.safety.hydra_versions import main_options

FULL_ERROR = "HYDRA_FULL_ERROR"


def run(job: Callable[[DictConfig], Any], argv: Sequence[str], folder: Path, name: str) -> None:
    """Let Hydra compose `argv`, make the run directory and call `job`, once or for each job of a sweep.

    Raises:
        Exception: what the job, or Hydra, raised.
    """
    with _arguments(argv), _errors_raised():
        hydra.main(config_path=str(folder), config_name=name, **main_options())(job)()


def quoted(path: Path) -> str:
    """A path as the value of an override."""
    escaped = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


@contextmanager
def _arguments(argv: Sequence[str]) -> Iterator[None]:
    """Hydra reads sys.argv."""
    before = sys.argv
    sys.argv = [before[0], *argv]
    try:
        yield
    finally:
        sys.argv = before


@contextmanager
def _errors_raised() -> Iterator[None]:
    """With HYDRA_FULL_ERROR=1 Hydra raises what it otherwise cuts, prints and turns into an exit code.

    One line it writes in any case, before raising; the message about the error is ours, so that line is left out.
    """
    before, stderr = os.environ.get(FULL_ERROR), sys.stderr
    os.environ[FULL_ERROR] = "1"
    sys.stderr = _WithoutLine(stderr, "Error executing job with overrides:")
    try:
        yield
    finally:
        sys.stderr = stderr
        if before is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = before


class _WithoutLine:
    """A text stream that drops what begins with `start`."""

    def __init__(self, stream: TextIO, start: str) -> None:
        self._stream = stream
        self._start = start

    def write(self, text: str) -> int:
        return len(text) if text.startswith(self._start) else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
