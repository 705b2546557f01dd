"""`python -m hydraloop results`: the results of a sweep."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

from hydraloop import json_answers
from hydraloop.cli.console import ConsoleHandler, PrintableFormatter, prepare_handlers
from hydraloop.sweeps.report import results, results_table
from hydraloop.sweeps.sweep_directory import SweepDirectory


def run(args: argparse.Namespace) -> int:
    """Print the results. Returns the exit code 0. Errors: as in `show`."""
    if args.json:
        sweep = SweepDirectory.load(args.directory, key="directory")
        json_answers.write("results", results.for_programs(sweep, results.collect(sweep)))
    else:
        log_to_terminal()
        show(args.directory)
    return 0


def show(path: Path) -> None:
    """Print tables, and write `results.csv` and `results.json`.

    Raises:
        UserError: the directory holds no sweep.
    """
    results_table.show(SweepDirectory.load(path, key="directory"))


def log_to_terminal() -> None:
    """Print log messages as on the command line."""
    handler = ConsoleHandler()
    handler.setFormatter(PrintableFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    prepare_handlers()
