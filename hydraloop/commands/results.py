"""`hydraloop results`: the results of a sweep."""

from __future__ import annotations

import argparse

from hydraloop.files.terminal import print_json
from hydraloop.sweeps import results, results_table
from hydraloop.sweeps.sweep_directory import SweepDirectory


def run(args: argparse.Namespace) -> int:
    """Print tables, and write `results.csv` and `results.json`. Returns the exit code 0.

    Raises:
        UserError: the directory holds no sweep.
    """
    sweep = SweepDirectory.load(args.directory, key="directory")
    if args.json:
        print_json(results.for_programs(sweep, results.collect(sweep)))
    else:
        results_table.show(sweep)
    return 0
