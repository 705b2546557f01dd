"""`python -m hydraloop replay <sweep>`: decides again what a search has decided. Imports no torch."""

from __future__ import annotations

import argparse

from hydraloop.errors import UserError, printable
from hydraloop.safety import working_directory
from hydraloop.sweeps.search_replay import replay
from hydraloop.sweeps.sweep_directory import SweepDirectory


def run(args: argparse.Namespace) -> int:
    """Print how many decisions were made again, and each that differs. Returns 0 if none does, otherwise 1.

    Raises:
        UserError: the directory holds a grid, its log is damaged, or an argument is about a run.
    """
    if args.overrides or args.pdb:
        remedy = "Leave them out. To replay one job, name its directory: replay <sweep>/<job> iteration=<n>"
        raise UserError("a search has no iterations: this command line has arguments of a run", remedy=remedy)
    working_directory.trust(["replay", str(args.run)], args.run, args.trusted)
    found = replay(SweepDirectory.load(args.run, key="run"))
    counts = ", ".join(f"{count:,} {kind}" for kind, count in found.counts.items())
    print(f"decided again: {counts or 'nothing, because the search has decided nothing'}")
    for line in found.differing:
        print(printable(f"differs: {line}"))
    print(f"{len(found.differing):,} of {found.counts.total():,} differ")
    return int(bool(found.differing))
