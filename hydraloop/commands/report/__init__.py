"""`hydraloop report`: a page of HTML about a run or a sweep, or a comparison of runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from hydraloop.commands.report import runs_page, sweep_page
from hydraloop.commands.report.page import FILENAME
from hydraloop.commands.report.run_data import RunData
from hydraloop.commands.status import sweep_in
from hydraloop.errors import UserError, printable
from hydraloop.files.environment import shown
from hydraloop.tracking.report_process import check_installed


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
