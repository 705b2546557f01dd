"""`hydraloop attach`: what a detached controller or a run prints, until it ends."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from hydraloop.commands.status import continue_hint, log_of, sweep_in
from hydraloop.errors import UserError, printable
from hydraloop.files import lock
from hydraloop.files.environment import without_project
from hydraloop.sweeps.executors.slurm_queue import current_states

_POLL = 0.3
"""Seconds between two reads of a log."""


def run(args: argparse.Namespace) -> int:
    """Print the log of a sweep or a run. Returns the exit code 0.

    Raises:
        UserError: the directory holds no sweep and no run, or there is no log.
    """
    sweep = sweep_in(args.directory)
    _follow(args.directory)
    for line in [] if sweep is None else continue_hint(sweep, current_states(sweep)):
        print(printable(line))
    return 0


def _follow(folder: Path) -> None:
    """Print a log until its process has ended."""
    log = log_of(folder)
    if log is None:
        remedy = f"See how it does: {without_project('status', folder)}"
        raise UserError(f"{folder} has no log: it was not detached", key="directory", remedy=remedy)
    with log.open("rb") as file:
        while True:
            has_ended = not lock.holder(folder)
            while line := file.readline(1 << 16):  # after the check of the end, so that no line is missed
                text = line.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")  # of progress bars
                sys.stdout.buffer.write(printable(text).encode())
            sys.stdout.buffer.flush()
            if has_ended:
                return
            time.sleep(_POLL)
