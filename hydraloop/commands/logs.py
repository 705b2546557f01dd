"""`python -m hydraloop logs`: what a job, a run or a detached controller has printed."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from hydraloop import json_answers
from hydraloop.commands.status import log_of, sweep_in
from hydraloop.errors import Remedy, UserError, printable
from hydraloop.run_files import lock

_POLL = 0.3
"""Seconds between two looks at a log."""


def run(args: argparse.Namespace) -> int:
    """Print a log. Returns the exit code 0. Errors: as in `show`."""
    if args.json:
        log, _ = _find(args.directory, args.job)
        lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
        json_answers.write("logs", {"log": log, "lines": lines})
    else:
        show(args.directory, args.job, follow=args.follow)
    return 0


def show(path: Path, number: int | None, *, follow: bool) -> None:
    """Print a log.

    Args:
        path: the directory of a sweep or a run.
        number: that of a job; None: the log of a run, or of the sweep's detached controller.
        follow: also print what is added, until the process has ended.

    Raises:
        UserError: there is no such job or no log.
    """
    log, alive = _find(path, number)
    with log.open("rb") as file:
        while True:
            is_over = not follow or not alive()
            while line := file.readline(1 << 16):  # after the end was seen, so that nothing is missed
                text = line.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")  # of progress bars
                sys.stdout.buffer.write(printable(text).encode())
            sys.stdout.buffer.flush()
            if is_over:
                return
            time.sleep(_POLL)


def _find(path: Path, number: int | None) -> tuple[Path, Callable[[], object]]:
    """Return a log, and what says whether its process is alive."""
    sweep, folder = sweep_in(path), path
    if sweep is not None and number is not None:
        last = sweep.count - 1
        if not 0 <= number <= last:
            remedy = Remedy(f"Name one from 0 to {last}.", (str(number), str(last)))
            raise UserError(f"the sweep has no job {number}", key="job", remedy=remedy)
        folder = sweep.folder(number)
    log = log_of(folder)
    if log is None:
        problem = "the job has not started" if number is not None else "there is no log"
        if sweep is not None and number is None:
            problem = "the sweep was not detached, so its controller has printed to its terminal"
        status = ["python", "-m", "hydraloop", "status", str(path)]
        remedy = Remedy(f"See which jobs there are: {shlex.join(status)}", command=status)
        raise UserError(problem, key="logs", remedy=remedy)
    return log, partial(lock.holder, folder)
