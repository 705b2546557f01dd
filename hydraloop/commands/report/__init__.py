"""`hydraloop report`: a page of HTML about a run or a sweep, or a comparison of runs."""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from hydraloop.commands.report import runs_page, sweep_page
from hydraloop.commands.report.page import FILENAME, SECONDS
from hydraloop.commands.report.run_data import RunData
from hydraloop.commands.status import sweep_in
from hydraloop.errors import UserError, not_installed, printable
from hydraloop.files.environment import shown
from hydraloop.files.result import describe
from hydraloop.sweeps.sweep_directory import SweepDirectory

log = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Write the page. Returns the exit code 0.

    Raises:
        UserError: plotly is not installed; or a directory holds no sweep and no run, or several hold a sweep.
    """
    check_installed()
    output: Path = args.output or (Path() if len(args.directory) > 1 else args.directory[0]) / FILENAME
    is_running = _write(args.directory, output, args.follow)
    follows = args.follow and is_running
    again = f": open it in a browser; it is written again every {SECONDS} s until the end" if follows else ""
    print(f"{printable(shown(output))}{again}", flush=True)
    while is_running and args.follow:
        time.sleep(SECONDS)
        is_running = _write(args.directory, output, args.follow)
    return 0


def _write(directories: Sequence[Path], output: Path, follow: bool) -> bool:
    """Write the page, and return whether the sweep or a run still runs."""
    sweeps = list(map(sweep_in, directories))
    if len(directories) > 1 and any(sweeps):
        remedy = "Name several runs, or one sweep. A job of a sweep is a run: its folder is that of its number."
        raise UserError("only runs are compared", key="directory", remedy=remedy)
    if sweeps[0] is not None:
        return sweep_page.write(sweeps[0], output, follow=follow)
    return runs_page.write([RunData(path.absolute()) for path in directories], output, follow=follow)


def check_installed(key: str | None = None) -> None:
    """Refuse to begin without plotly.

    Raises:
        UserError: it is not installed; names `key`.
    """
    if find_spec("plotly") is None:
        raise not_installed("plotly", key=key, use="draws the report")


def write_report(folder: Path) -> None:
    """Write `report.html` into the folder of a sweep. If that is not possible, a warning says why."""
    output = folder / FILENAME
    try:
        sweep_page.write(SweepDirectory.load(folder), output)
    except Exception as error:  # the sweep itself has succeeded
        log.warning("the report cannot be written: %s", describe(error))
    else:
        log.info("report: %s", shown(output))
