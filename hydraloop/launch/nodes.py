"""Ranks on several nodes. Slurm's `srun` starts the command on each node, and each of these processes starts ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from hydraloop.errors import UserError
from hydraloop.importing import uncollected
from hydraloop.launch.failure import Failure

_KEY = "distributed.nnodes"
_TIMEOUT = 900
"""Seconds to wait for the processes of the other nodes, whose Python may come from a slow disk."""
_TELLING = 35.0
"""Seconds to wait for the failures of other nodes: torch's launcher kills ranks that have not ended after 30 s."""
_READING = 5.0
"""Seconds that the process that keeps the store waits until the other ones have read."""


def rendezvous(nodes: int) -> dict[str, Any]:
    """Return options of torch's launcher with which the processes of all nodes find each other.

    Raises:
        UserError: Slurm has not started one process on each of the nodes.
    """
    _check(nodes)
    first, own = _addresses()
    job, step = (int(os.environ[name]) for name in ("SLURM_JOB_ID", "SLURM_STEP_ID"))
    return {
        "min_nodes": nodes,
        "max_nodes": nodes,
        "run_id": f"{job}.{step}",
        "rdzv_endpoint": f"{first}:{10_000 + (job * 100 + step) % 20_000}",  # below the ports that Linux gives
        "rdzv_configs": {"is_host": os.environ["SLURM_NODEID"] == "0", "join_timeout": _TIMEOUT},
        "local_addr": own,
    }


class Meeting:
    """Where the processes that have started ranks tell each other how their ranks have failed.

    Args:
        options: as `rendezvous` returns them. The store of torch's launcher is used, and kept until it was read.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        with uncollected():
            from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it untyped

        host, _, port = options["rdzv_endpoint"].rpartition(":")
        self._count, self._is_host = options["min_nodes"], options["rdzv_configs"]["is_host"]
        wait = timedelta(seconds=_TIMEOUT)
        shared = {"multi_tenant": True, "wait_for_workers": False}
        self._store = TCPStore(host, int(port), is_master=self._is_host, timeout=wait, **shared)

    def gathered(self, failures: Sequence[Failure]) -> list[Failure]:
        """Return the failures of the ranks of all nodes that have failed and tell it in time, if any rank here has."""
        if not failures:
            return []
        names = [f"failures-{node}" for node in range(self._count)]
        own, found = os.environ["SLURM_NODEID"], list(failures)
        try:
            self._store.set(f"failures-{own}", json.dumps([failure.to_json() for failure in failures]))
            with suppress(RuntimeError):  # a node has died, or its ranks have finished
                self._store.wait(names, timedelta(seconds=_TELLING))
            others = [name for name in names if name != f"failures-{own}" and self._store.check([name])]
            found += [Failure.from_json(text) for name in others for text in json.loads(self._store.get(name))]
            read = self._store.add("read", 1)
            until = time.monotonic() + _READING
            while self._is_host and read < len(others) + 1 and time.monotonic() < until:
                time.sleep(0.05)
                read = self._store.add("read", 0)
        except (RuntimeError, OSError):  # the process that keeps the store has ended
            pass
        return found


def _check(nodes: int) -> None:
    started = tuple(os.environ.get(f"SLURM_STEP_NUM_{what}") for what in ("NODES", "TASKS"))
    if started != (str(nodes), str(nodes)):
        found = "srun has not started this process"
        if None not in started:
            found = f"srun has started {started[1]} processes on {started[0]} nodes"
        raise UserError(
            f"{nodes} nodes need one process on each, and {found}",
            key=_KEY,
            remedy=f"Put this before the command: srun --nodes={nodes} --ntasks-per-node=1",
        )


def _addresses() -> tuple[str, str]:
    """Return the addresses of the first node and of this one, as Slurm knows them: their names may not resolve."""
    names = _scontrol("hostnames", os.environ["SLURM_STEP_NODELIST"]).split()
    described = [_scontrol("node", name) for name in (names[0], os.environ["SLURMD_NODENAME"])]
    first, own = (re.search(r"NodeAddr=(\S+)", text) for text in described)
    assert first is not None
    assert own is not None
    return first[1], own[1]


def _scontrol(*what: str) -> str:
    done = subprocess.run(
        ["scontrol", "show", *what], capture_output=True, encoding="utf-8", errors="replace", check=False
    )
    if done.returncode:
        raise UserError(f"scontrol does not know the nodes: {done.stderr.strip()}", key=_KEY)
    return done.stdout
