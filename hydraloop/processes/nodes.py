"""Ranks on several nodes. Slurm's `srun` starts the command on each node, and each of these processes starts ranks."""

from __future__ import annotations

import os
import re
import subprocess
from typing import Any

from hydraloop.errors import UserError

_KEY = "distributed.nnodes"
_TIMEOUT = 900
"""Seconds to wait for the processes of the other nodes, whose Python may come from a slow disk."""


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
