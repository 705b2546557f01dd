"""`python scripts/sync.py <run or sweep directory>`: send what the trackers of a run, or of many, do not have yet.

Each record is sent exactly once: it goes on where each tracker's cursor stands, with the same code as while training.
A run that is being followed, or still trains, is left to its follower.
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
from hydraloop.tracking.follower.cursor import Cursor, names
from hydraloop.tracking.follower.follower import Follower, Trouble, described
from hydraloop.tracking.follower.locks import FOLDER, lock_of
from hydraloop.tracking.follower.masked_logging import log_to_stderr
from hydraloop.tracking.kinds import tracker_of
from hydraloop.tracking.tracker import Attempt, Finish

log = logging.getLogger(__name__)

SYNC = "_sync"
"""Set in a tracker's options by this script: it may take its time, and finish what an earlier process could not."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one run at one tracker."""

    run_dir: Path
    name: str
    sent: int
    """Records sent now."""
    there: int
    """Records the service has, now and before."""
    total: int
    """Records of the run."""
    problem: str | None
    """Why not all; None where all is well."""
    where: str | None


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 0 where everything is there, 1 where something is left, 2 for a wrong argument."""
    parser = argparse.ArgumentParser(prog="sync.py", description="Send what trackers do not have yet of a run.")
    parser.add_argument("directory", type=Path, nargs="+", help="of a run, of a sweep, or one above them (outputs/)")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run and tracker; default 600")
    args = parser.parse_args(argv)
    if argv is None:  # typed: the process is ours alone
        log_to_stderr(logging.WARNING, "%(message)s")
    outcomes: list[Outcome] = []
    problems: list[str] = []
    for directory in args.directory:
        found = list(run_dirs(directory))
        if not found:
            print(f"error: {directory} has no run that a tracker has followed", file=sys.stderr)
            return 2
        for run_dir in found:
            for name in names(run_dir):
                outcomes.append(synced(run_dir, name, timeout=args.timeout))
                print(mask_text(_line(outcomes[-1])), flush=True)
        problems += _finish_sweeps(found)
    for problem in problems:
        print(mask_text(problem))
    return 0 if not problems and all(outcome.problem is None for outcome in outcomes) else 1


def run_dirs(directory: Path) -> Iterator[Path]:
    """The runs in and below a directory that a tracker has followed, in order."""
    found = {path.parent.parent for path in directory.rglob(f"{FOLDER}/*.cursor.json")}
    return iter(sorted(found, key=lambda path: [(len(part), part) for part in path.parts]))


def synced(run_dir: Path, name: str, *, timeout: float) -> Outcome:
    """Send one tracker the rest of one run, and how it ended. Whatever is wrong here, others have their turn."""
    try:
        with lock_of(run_dir, name).acquire(timeout=0):
            return _synced(run_dir, name, timeout)
    except Timeout:
        problem = "it is being followed by the run itself"
    except Exception as error:
        log.debug("not this one", exc_info=error)
        problem = described(error)
    try:
        cursor = Cursor.load(run_dir, name)
    except Exception:
        cursor = None
    return _outcome(run_dir, name, cursor, 0, problem)


def _synced(run_dir: Path, name: str, timeout: float) -> Outcome:
    cursor, run = Cursor.load(run_dir, name), description.read(run_dir)
    if cursor is None or run is None:
        return _outcome(run_dir, name, cursor, 0, "nothing says what run it is")
    before = cursor.sent
    ended = description.ending(run_dir, run.attempt)
    finish = None if ended.status == "killed" and _trains(run.attempt) else ended
    tracker = tracker_of(cursor.kind)({**cursor.options, SYNC: True}, run, cursor.memory)
    troubles: list[Trouble] = []

    def told(trouble: Trouble | None) -> None:
        troubles[:] = [] if trouble is None else [trouble]

    try:
        state = _drained(Follower(tracker, cursor, run_dir, name, told), finish, timeout)
    finally:
        tracker.close()
    problem = None
    if state != "done":
        problem = troubles[0].text if troubles else "the run goes on" if finish is None else "the time was over"
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
"""In a row that may fail: whoever types the command sees what is wrong, and types it again later."""


def _trains(attempt: Attempt) -> bool:
    """Whether the process of the attempt is still there, on this machine."""
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
    """Tell the parent runs of the sweeps that these are jobs of how they ended. Returns what went wrong."""
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
