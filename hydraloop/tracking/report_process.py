"""Writes the report of a run or a sweep in another process, which imports plotly and Optuna. Imports no torch."""

from __future__ import annotations

import logging
import subprocess
from importlib.util import find_spec
from pathlib import Path

from hydraloop.errors import not_installed
from hydraloop.tracking.sender import spawn

log = logging.getLogger(__name__)

_SECONDS = 300.0
"""A sweep of 10,000 jobs takes a minute on a busy machine."""


def check_installed(key: str | None = None) -> None:
    """Refuse to begin without plotly.

    Raises:
        UserError: it is not installed; names `key`.
    """
    if find_spec("plotly") is None:
        raise not_installed("plotly", key=key, use="draws the report")


def write_report(folder: Path) -> None:
    """Write `report.html` into the folder of a run or a sweep. If that is not possible, a warning says why."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with spawn("hydraloop", "report", str(folder), **pipes) as process:
        try:
            printed = process.communicate(timeout=_SECONDS)[0].decode("utf-8", "replace").strip()
        except subprocess.TimeoutExpired:
            printed = f"it takes longer than {_SECONDS:g} s"
        finally:  # after Ctrl-C, too
            process.kill()
    if process.returncode:
        log.warning("the report cannot be written: %s", printed)
    else:
        log.info("report: %s", printed)
