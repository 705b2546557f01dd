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
_REPORT_WITHIN = 35.0
"""Seconds to wait for the failures of other nodes: torch's launcher kills ranks that have not ended after 30 s."""
_READ_WITHIN = 5.0
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


class FailureExchange:
    """Lets the processes that have started ranks on several nodes exchange the failures of their ranks.

    Args:
        options: as `rendezvous` returns them. The store of torch's launcher is used, and kept until it was read.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        with uncollected():
            from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch re-exports it untyped

        host, _, port = options["rdzv_endpoint"].rpartition(":")
        self._nodes = options["min_nodes"]
        self._is_host = options["rdzv_configs"]["is_host"]
        wait = timedelta(seconds=_TIMEOUT)
        shared = {"multi_tenant": True, "wait_for_workers": False}
        self._store = TCPStore(host, int(port), is_master=self._is_host, timeout=wait, **shared)

    def of_all_nodes(self, failures: Sequence[Failure]) -> list[Failure]:
        """Return the failures of the ranks of all nodes that report them in time.

        Args:
            failures: of the ranks of this node. Without one, other nodes are not asked.
        """
        if not failures:
            return []
        own = f"failures-{os.environ['SLURM_NODEID']}"
        others = [name for node in range(self._nodes) if (name := f"failures-{node}") != own]
        gathered = list(failures)
        try:
            self._store.set(own, json.dumps([failure.to_json() for failure in failures]))
            with suppress(RuntimeError):  # a node has died, or its ranks have finished
                self._store.wait(others, timedelta(seconds=_REPORT_WITHIN))
            reporting = [name for name in others if self._store.check([name])]
            gathered += [Failure.from_json(text) for name in reporting for text in json.loads(self._store.get(name))]
            self._wait_for_readers(len(reporting) + 1)
        except (RuntimeError, OSError):  # the process that keeps the store has ended
            pass
        return gathered

    def _wait_for_readers(self, count: int) -> None:
        """Keep the store until `count` nodes have read it."""
        done = self._store.add("read", 1)
        until = time.monotonic() + _READ_WITHIN
        while self._is_host and done < count and time.monotonic() < until:
            time.sleep(0.05)
            done = self._store.add("read", 0)


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
