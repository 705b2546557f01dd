"""`python scripts/sync.py <run or sweep directory>`: send the records that trackers do not have yet.

Each record is sent exactly once: sending resumes at each tracker's cursor, with the same code as during training.
Runs that are still training or being followed are skipped.
"""

from __future__ import annotations

import argparse
import logging
import os
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from filelock import Timeout

from hydraloop.run.processes import is_alive
from hydraloop.run.record_log import FILENAME, count
from hydraloop.safety.secrets import mask_text
from hydraloop.tracking import description, parent
from hydraloop.tracking.follower.cursor import Cursor, hook_names
from hydraloop.tracking.follower.follower import Follower, Trouble, described
from hydraloop.tracking.follower.locks import FOLDER, lock_of
from hydraloop.tracking.follower.masked_logging import log_to_stderr
from hydraloop.tracking.kinds import load_tracker
from hydraloop.tracking.tracker import Attempt, Finish

log = logging.getLogger(__name__)

SYNC = "_sync"
"""Option that `sync.py` adds to a tracker's: it may take longer, and complete what an earlier process could not."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of sending one run to one tracker."""

    run_dir: Path
    name: str
    sent: int
    """Records sent by this call."""
    there: int
    """Records that the service has now."""
    total: int
    """All records of the run."""
    problem: str | None
    """Why not everything was sent; None if everything was."""
    where: str | None


def main(argv: Sequence[str] | None = None) -> int:
    """Send what is left. Returns the exit code: 0 if all is sent, 1 if something is left, 2 for a wrong argument."""
    parser = argparse.ArgumentParser(prog="sync.py", description="Send the records that trackers do not have yet.")
    parser.add_argument("directory", type=Path, nargs="+", help="a run, a sweep, or a folder of them (outputs/)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run and tracker; default 600")
    args = parser.parse_args(argv)
    if argv is None:  # started from the command line: this process has no logging of its own yet
        log_to_stderr(logging.WARNING, "%(message)s")
    outcomes: list[Outcome] = []
    problems: list[str] = []
    for directory in args.directory:
        found = list(run_dirs(directory))
        if not found:
            print(f"error: {directory} has no run with a tracker", file=sys.stderr)
            return 2
        for run_dir in found:
            for name in hook_names(run_dir):
                outcomes.append(synced(run_dir, name, timeout=args.timeout))
                print(mask_text(_line(outcomes[-1])), flush=True)
        problems += _finish_sweeps(found)
    for problem in problems:
        print(mask_text(problem))
    return 0 if not problems and all(outcome.problem is None for outcome in outcomes) else 1


def run_dirs(directory: Path) -> Iterator[Path]:
    """Return the runs with a tracker in a directory and below it, in order."""
    found = {path.parent.parent for path in directory.rglob(f"{FOLDER}/*.cursor.json")}
    return iter(sorted(found, key=lambda path: [(len(part), part) for part in path.parts]))


def synced(run_dir: Path, name: str, *, timeout: float) -> Outcome:
    """Send the rest of one run, and how it ended, to one tracker. Any error is part of the outcome."""
    try:
        with lock_of(run_dir, name).acquire(timeout=0):
            return _synced(run_dir, name, timeout)
    except Timeout:
        problem = "the run is still sending its records"
    except Exception as error:
        log.debug("cannot be sent", exc_info=error)
        problem = described(error)
    try:
        cursor = Cursor.load(run_dir, name)
    except Exception:
        cursor = None
    return _outcome(run_dir, name, cursor, 0, problem)


def _synced(run_dir: Path, name: str, timeout: float) -> Outcome:
    cursor, run = Cursor.load(run_dir, name), description.read(run_dir)
    if cursor is None or run is None:
        return _outcome(run_dir, name, cursor, 0, "its description in tracking/ is missing")
    before = cursor.sent
    ended = description.ending(run_dir, run.attempt)
    finish = None if ended.status == "killed" and _trains(run.attempt) else ended
    tracker = load_tracker(cursor.kind)({**cursor.options, SYNC: True}, run, cursor.memory)
    troubles: list[Trouble] = []

    def told(trouble: Trouble | None) -> None:
        troubles[:] = [] if trouble is None else [trouble]

    try:
        state = _drained(Follower(tracker, cursor, run_dir, name, told), finish, timeout)
    finally:
        tracker.close()
    problem = None
    if state != "done":
        problem = troubles[0].text if troubles else "the run is still training" if finish is None else "timed out"
    return _outcome(run_dir, name, cursor, max(0, cursor.sent - before), problem)


def _drained(follower: Follower, finish: Finish | None, timeout: float) -> str:
    deadline, tries = time.monotonic() + timeout, 0
    while True:
        state = follower.step(finish)
        tries = tries + 1 if state == "in trouble" else 0
        if state in ("done", "given up", "caught up") or tries >= _TRIES or time.monotonic() >= deadline:
            return state
        if state == "in trouble":
            time.sleep(follower.wait(ending=True))


_TRIES = 3
"""Failures in a row after which a tracker is given up. The user sees the problem and can repeat the command."""


def _trains(attempt: Attempt) -> bool:
    """Return whether the process of the attempt is still running, on this machine."""
    return attempt.tags.get("host") == socket.gethostname() and is_alive(attempt.pid, attempt.started)


def _outcome(run_dir: Path, name: str, cursor: Cursor | None, sent: int, problem: str | None) -> Outcome:
    if cursor is None:
        return Outcome(run_dir, name, 0, 0, 0, problem, None)
    return Outcome(run_dir, name, sent, cursor.sent, count(run_dir / FILENAME), problem, cursor.where)


def _line(outcome: Outcome) -> str:
    text = f"{os.path.relpath(outcome.run_dir)}  {outcome.name}: "
    text += f"{outcome.sent:,} sent, {outcome.there:,} of {outcome.total:,} records there"
    if outcome.problem is not None:
        return f"{text}; not all: {outcome.problem}"
    return f"{text}, {outcome.where}" if outcome.where else text


def _finish_sweeps(found: Sequence[Path]) -> list[str]:
    """Tell the parent runs of the sweeps that these jobs belong to how they ended. Returns the problems."""
    problems = []
    folders: set[Path] = set()
    for run_dir in found:
        try:
            sweep = description.sweep_of(run_dir)
        except Exception as error:
            problems.append(f"{os.path.relpath(run_dir)}: its sweep: {described(error)}")
        else:
            folders |= set() if sweep is None else {sweep.folder}
    for folder in sorted(folders):
        for path in parent.parents(folder):
            try:
                given = parent.read(path)
                parent.finish(folder, {**given, "options": {**given["options"], SYNC: True}})
            except Exception as error:
                problems.append(f"{os.path.relpath(folder)}: the sweep's parent run: {described(error)}")
    return problems


if __name__ == "__main__":
    sys.exit(main())
