"""The tasks of a sweep that was submitted as arrays of Slurm, from any machine that sees its directory.

Each submission has a file in the folder `arrays/`, with the ids of its arrays and the overrides of the tasks.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

FOLDER = "arrays"
_ENDING = 60.0
"""Seconds that tasks may take to end: Slurm kills them `KillWait` after a signal, 30 s by default."""
_POLL = 0.5
"""Seconds between two looks at Slurm's queue."""


def arrays(sweep: Path) -> list[str]:
    """Return the ids of a sweep's arrays, in the order of their submission; none if it was not submitted so."""
    found: list[str] = []
    for path in sorted((sweep / FOLDER).glob("*.json")):
        with suppress(OSError, ValueError):
            found += json.loads(path.read_bytes())["arrays"]
    return found


def counts(sweep: Path) -> Counter[str] | None:
    """Return the tasks in Slurm's queue by their state; None if this machine has no Slurm.

    A state is as squeue prints it, with the reason of a task that waits: `RUNNING`, `PENDING (Resources)`.
    """
    if not (found := arrays(sweep)):
        return Counter()
    listed = run("squeue", "--noheader", "--array", "--format=%T (%r)", f"--jobs={','.join(found)}")
    return None if listed is None else Counter(line.removesuffix(" (None)") for line in listed.splitlines())


def cancel(sweep: Path) -> bool:
    """Cancel the tasks of a sweep, whose jobs save, and wait for their end. Return whether none is left."""
    if not (found := arrays(sweep)):
        return True
    run("scancel", *found)
    until = time.monotonic() + _ENDING
    while (left := counts(sweep)) and time.monotonic() < until:
        time.sleep(_POLL)
    return left is not None and not left


def cancel_waiting(sweep: Path) -> None:
    """Cancel the tasks that have not started."""
    if found := arrays(sweep):
        run("scancel", "--state=PENDING", *found)


def lines(sweep: Path) -> Iterator[str]:
    """Yield the line of `status` about the tasks."""
    if found := arrays(sweep):
        left = counts(sweep)
        by_state = ", ".join(f"{count} {state}" for state, count in sorted((left or {}).items()))
        tasks = "unknown, because this machine has no squeue" if left is None else by_state or "none in the queue"
        yield f"Slurm: array {', '.join(found)}; tasks: {tasks}"


def run(*words: str) -> str | None:
    """Return the output of a command of Slurm; None if this machine does not have it."""
    with suppress(OSError):
        return subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace", check=False).stdout
    return None
