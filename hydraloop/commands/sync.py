"""`python -m hydraloop sync`: send the records and files that trackers do not have yet.

Each record is sent exactly once: sending resumes at each tracker's cursor, with the same code as during training.
Runs that are still training or being followed are skipped. A cursor may come from anywhere, so it only selects
hydraloop's own classes and those in `--trusted` packages.
"""

from __future__ import annotations

import argparse
import logging
import os
import re
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from filelock import Timeout

from hydraloop.errors import not_installed, printable
from hydraloop.run_files.processes import is_alive
from hydraloop.run_files.record_log import FILENAME, count
from hydraloop.safety.secret_names import name_secrets
from hydraloop.safety.secrets import MASK, mask_text, masked, remember
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import Cursor, hook_names, lock_of, run_dirs
from hydraloop.tracking.follower import Follower, described
from hydraloop.tracking.masked_output import log_to_stderr
from hydraloop.tracking.tracker import OWN, Attempt, Tracker, load_tracker

log = logging.getLogger(__name__)

SYNC = "_sync"
"""Option that sync adds to a tracker's: it may take longer than `flush_timeout`."""
_TRIES = 3
"""Failures in a row, without progress, after which a tracker is given up. The user can repeat the command."""
_BUSY = 20.0
"""Seconds without progress after which a service that is there but refuses is given up; `sync` has no other limit."""
_OPTION = re.compile(r"(?:default_)?hooks\.(\w+)\.(\w+)=(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class How:
    """How runs are sent."""

    again: bool = False
    """Whether everything is sent again, to a service that has nothing of the run; only to those in `options` if any."""
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Options that replace those of the run, by the name of the hook."""
    trusted: Sequence[str] = ()
    """Packages that may contain trackers."""


def run(args: argparse.Namespace) -> int:
    """Send what is left. Returns the exit code: 0 if all is sent, 1 if something is left, 2 for a wrong argument."""
    if args.trusted:
        sys.path.insert(0, os.getcwd())  # `__main__` has removed it
    log_to_stderr(logging.WARNING, "%(message)s")
    options: dict[str, dict[str, Any]] = {}
    directories = []
    for argument in args.directory:
        if (option := _OPTION.fullmatch(argument)) is None:
            directories.append(Path(argument))
        else:
            options.setdefault(option[1], {})[option[2]] = yaml.safe_load(option[3])
    return send_all(directories, How(args.again, options, args.trusted))


def send_all(directories: Sequence[Path], how: How = How()) -> int:
    """Send what is left of all runs in some directories, and print a line for each. Returns the exit code."""
    complete = True
    for directory in directories:
        found = run_dirs(directory)
        if not found:
            print(f"error: {directory} has no run with a tracker", file=sys.stderr)
            return 2
        for run_dir in found:
            for name in hook_names(run_dir):
                if not (how.again and how.options) or name in how.options:
                    complete &= _send(run_dir, name, how)
    return 0 if complete else 1


def _send(run_dir: Path, name: str, how: How) -> bool:
    """Send the rest of one run, and how it ended, to one tracker. Prints the outcome. Returns whether all is there."""
    cursor, before, problem = None, 0, None
    try:
        with lock_of(run_dir, name).acquire(timeout=0):
            cursor, run = Cursor.load(run_dir, name), run_description.read(run_dir)
            if cursor is None or run is None:
                raise ValueError("its description in tracking/ is missing")
            name_secrets(run_description.names_of_secrets(run_dir))
            remember(how.options)
            kind = _kind(cursor.kind, how.trusted)
            options = {**cursor.options, **how.options.get(name, {})}
            if unknown := options.keys() - cursor.options.keys():
                raise ValueError(f"hooks.{name}.{min(unknown)}: no such option")
            hidden = [f"hooks.{name}.{option}" for option, value in options.items() if MASK in str(value)]
            if hidden and cursor.kind not in OWN.values():  # those take their secrets from the environment
                raise ValueError(f"{hidden[0]} has a secret, which is not stored: add {hidden[0]}=<value>")
            if how.again:
                cursor = Cursor(cursor.kind, cursor.options, memory={"again": True})
                cursor.save(run_dir, name)
            before, cursor.options = cursor.sent, masked(options)
            problem = _drained(kind({**options, SYNC: True}, run, cursor.memory), cursor, name)
    except Timeout:
        problem = "the run is still sending its records"
    except Exception as error:
        log.debug("cannot be sent", exc_info=error)
        problem = described(error)
    there, where = (0, None) if cursor is None else (cursor.sent, cursor.where)
    text = f"{os.path.relpath(run_dir)}  {name}: {max(0, there - before):,} sent, "
    text += f"{there:,} of {count(run_dir / FILENAME):,} records there"
    if cursor is not None and cursor.left_out:
        text += f", {cursor.left_out:,} left out by interval"
    if problem is not None:
        text += f"; not all: {problem}"
    elif where is not None:
        text += f", {where}"
    print(printable(mask_text(text)), flush=True)
    return problem is None


def _kind(kind: str, trusted: Sequence[str]) -> type[Tracker]:
    """Return the class that a cursor names.

    Raises:
        ValueError: the class is not permitted, or its library is not installed.
    """
    try:
        return load_tracker(kind, packages=trusted)
    except ModuleNotFoundError as error:
        if error.name not in OWN:
            raise
        mistake = not_installed(error.name)
        raise ValueError(f"{mistake.problem}: {mistake.remedy}") from None
    except ValueError as error:
        package = kind.partition(".")[0]
        remedy = "start the command in the project's folder" if package in trusted else f"add --trusted {package}"
        raise ValueError(f"{error}; if you trust its code, {remedy}") from error


def _drained(tracker: Tracker, cursor: Cursor, name: str) -> str | None:
    """Send all that is there. Returns why it is not all that there will be."""
    run = tracker.run
    ended = run_description.ending(run.run_dir, run.attempt)
    finish = None if ended.status == "killed" and _trains(run.attempt) else ended
    troubles: list[str | None] = [None]
    follower = Follower(tracker, cursor, run.run_dir, name, troubles.append)
    try:
        while True:
            state = follower.step(finish)
            hopeless = follower.failing >= _BUSY if follower.is_busy else follower.failures >= _TRIES
            if state == "done":
                return None
            if state == "caught up":
                return "the run is still training"
            if state == "given up" or hopeless:
                return troubles[-1] or "the service asks to try later"
            if state == "in trouble":
                time.sleep(min(follower.wait(ending=True), _BUSY))
    finally:
        tracker.close()


def _trains(attempt: Attempt) -> bool:
    """Return whether the process of the attempt is still running, on this machine."""
    return attempt.tags.get("host") == socket.gethostname() and is_alive(attempt.pid, attempt.started)
