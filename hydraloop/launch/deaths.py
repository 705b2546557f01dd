"""Deaths: the ranks that have died, under a launcher that does not report it to the other ranks.

Each rank but rank 0 writes into the store that it has begun and, however it ends, that it has ended. If its process is
gone and it has not written the latter, it was killed. Rank 0 can see that for the ranks on its own machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import Any

from hydraloop.launch import rank_log
from hydraloop.launch.job import Job
from hydraloop.launch.outcome import Outcome
from hydraloop.run.processes import is_alive, started


def begun(store: Any, rank: int, log: Path) -> None:
    """Write into the store that this rank has begun, and from now on handles signals."""
    noted = {"host": socket.gethostname(), "pid": os.getpid(), "started": started(os.getpid())}
    with contextlib.suppress(RuntimeError, OSError):  # the process that keeps the store has gone
        store.set(f"begun-{rank}", json.dumps({**noted, "log": log.stat().st_size}))


def ended(store: Any, rank: int) -> None:
    """Write into the store that this rank has ended, or will within a moment."""
    with contextlib.suppress(RuntimeError, OSError):
        store.set(f"ended-{rank}", "")


def look(store: Any, job: Job) -> tuple[Outcome | None, bool]:
    """Look for a rank that has died on this machine.

    Returns:
        Its outcome, None if there is none; and whether a rank on this machine has neither died nor ended.

    Raises:
        RuntimeError: the process that keeps the store has gone.
    """
    others_live = False
    for rank in range(1, int(os.environ["WORLD_SIZE"])):
        if not store.check([f"begun-{rank}"]):
            continue
        noted = json.loads(store.get(f"begun-{rank}"))
        if noted["host"] != socket.gethostname():
            continue
        alive = is_alive(noted["pid"], noted["started"])  # before the next line, which is written before it ends
        if store.check([f"ended-{rank}"]):
            continue
        if not alive:
            log = rank_log.path(job, rank)
            return Outcome.of_death(rank, -rank_log.crash(log, noted["log"]), os.path.relpath(log)), others_live
        others_live = True
    return None, others_live
