"""`python -m hydraloop attach`: a sweep until nothing of it runs, then its results; or the log of a run."""

from __future__ import annotations

import argparse

from hydraloop.commands import logs, results
from hydraloop.commands.status import hint, sweep_in
from hydraloop.errors import printable
from hydraloop.sweeps.current_states import current_states
from hydraloop.sweeps.report.display import watch
from hydraloop.sweeps.report.lines import Lines


def run(args: argparse.Namespace) -> int:
    """Show it. Returns the exit code 0.

    Raises:
        UserError: the directory holds no sweep and no run, or the run has no log.
    """
    sweep = sweep_in(args.directory)
    if sweep is None:
        logs.show(args.directory, None, follow=True)
        return 0
    results.log_to_terminal()
    watch(Lines(sweep))
    results.show(args.directory)
    for line in hint(sweep, current_states(sweep)):
        print(printable(line))
    return 0
