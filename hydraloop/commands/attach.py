"""`python -m hydraloop attach`: what a detached controller or a run prints, until it ends."""

from __future__ import annotations

import argparse

from hydraloop.commands import logs
from hydraloop.commands.status import hint, sweep_in
from hydraloop.errors import printable
from hydraloop.sweeps.current_states import current_states


def run(args: argparse.Namespace) -> int:
    """Print it. Returns the exit code 0.

    Raises:
        UserError: the directory holds no sweep and no run, or there is no log.
    """
    sweep = sweep_in(args.directory)
    logs.show(args.directory, None, follow=True)
    for line in [] if sweep is None else hint(sweep, current_states(sweep)):
        print(printable(line))
    return 0
