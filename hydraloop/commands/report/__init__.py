"""`hydraloop report`: a page of HTML about a run or a sweep, or a comparison of runs."""

from __future__ import annotations

import argparse
import logging
from importlib.util import find_spec
from pathlib import Path

from hydraloop.commands.report import runs_page, sweep_page
from hydraloop.commands.report.page import FILENAME
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
    first, *others = args.directory
    output: Path = args.output or (Path() if others else first) / FILENAME
    sweeps = list(map(sweep_in, args.directory))
    if others and any(sweeps):
        remedy = "Name several runs, or one sweep. A job of a sweep is a run: its folder is that of its number."
        raise UserError("only runs are compared", key="directory", remedy=remedy)
    if sweeps[0] is None:
        runs_page.write([RunData(path.absolute()) for path in args.directory], output)
    else:
        sweep_page.write(sweeps[0], output)
    print(printable(shown(output)))
    return 0


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
