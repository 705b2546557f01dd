"""`hydraloop sync`: send the records and files that trackers do not have yet.

Each record is sent exactly once: sending resumes at each tracker's cursor, with the same code as during training.
Runs that are still training or being followed are skipped. A description may come from anywhere, so it only selects
hydraloop's own classes and, after `python train.py`, those of the project.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from hydraloop.errors import printable
from hydraloop.files.console import log_to_stderr
from hydraloop.files.metrics_log import FILENAME, count
from hydraloop.files.secrets import mask_text
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import Cursor, run_dirs
from hydraloop.tracking.run_sender import Access, SendOnce, follow, send


def run(args: argparse.Namespace) -> int:
    """Send all records. Returns the exit code: 0 if all are sent, 1 if some are not, 2 for a wrong argument."""
    if args.follow:
        follow(args.directory[0])
    log_to_stderr(logging.WARNING, "%(message)s")
    return send_all(args.directory)


def send_all(directories: Sequence[Path]) -> int:
    """Send the records of all runs in some directories, and print a line for each tracker. Returns the exit code."""
    access = Access(folders=ALLOWLIST.folders, packages=ALLOWLIST.packages)
    complete = True
    for directory in directories:
        runs = run_dirs(directory)
        if not runs:
            print(f"error: {directory} has no run with a tracker", file=sys.stderr)
            return 2
        for run_dir in runs:
            attempt, trackers = run_description.trackers_of(run_dir)
            if attempt < 0:
                print(printable(f"{os.path.relpath(run_dir)}  not all: its description in tracking/ cannot be read"))
                complete = False
            for name in sorted(trackers):
                complete &= _send(run_dir, name, access)
    return 0 if complete else 1


def _send(run_dir: Path, name: str, access: Access) -> bool:
    """Send the missing records of a run, and how it ended, to a tracker. Return whether the tracker has all records."""
    before = Cursor.load(run_dir, name)
    problem = send(run_dir, name, access, SendOnce())
    cursor = Cursor.load(run_dir, name) or Cursor("")
    sent = max(0, cursor.sent - (0 if before is None else before.sent))
    text = f"{os.path.relpath(run_dir)}  {name}: {sent:,} sent, "
    text += f"{cursor.sent:,} of {count(run_dir / FILENAME):,} records there"
    if problem is not None:
        text += f"; not all: {problem}"
    elif cursor.where is not None:
        text += f", {cursor.where}"
    print(printable(mask_text(text)), flush=True)
    return problem is None
