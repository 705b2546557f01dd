"""A Ray cluster of two nodes on this machine, in a process of its own. A node that is killed is replaced.

`python -m tests.faults.sweeps.ray_cluster <folder>` prints its address, and ends with its input.
"""

from __future__ import annotations

import functools
import os
import select
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_gcs_server_port_wait_time_s": "120"}
OPTIONS = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
SLOTS = 2
"""Jobs for which each node has room."""


@contextmanager
def short_folder() -> Iterator[Path]:
    """Return a folder for Ray. Sockets in pytest's folders would have too long paths."""
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@contextmanager
def running(folder: Path) -> Iterator[str]:
    """Run a cluster in the body, and return its address."""
    command = [sys.executable, "-m", __spec__.name, str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=os.environ | QUIET, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            address = next((line for line in process.stdout if line.startswith("address ")), "")
            assert address, "no cluster"
            yield address.split()[1]
        finally:
            process.stdin.close()
            process.wait(120)


def start_fairly() -> None:
    """Give each process of Ray a session: Linux shares processors among sessions, and Ray waits for each only 30 s."""
    from ray._private import services

    start = services.ConsolePopen.__init__
    services.ConsolePopen.__init__ = functools.partialmethod(start, start_new_session=True)


def retried(start: Callable[[], Any], times: int = 4) -> Any:
    """Start something of Ray, which gives up after 30 s on a busy machine."""
    for left in reversed(range(times)):
        try:
            return start()
        except Exception:
            if not left:
                raise
    return None


def add_node(cluster: Any, slots: int) -> Any:
    """Add a node to a cluster."""
    return retried(lambda: cluster.add_node(num_cpus=slots, **OPTIONS))


def new_cluster(folder: str) -> Any:
    """Return a cluster whose head runs no jobs."""
    from ray._common.utils import get_default_ray_temp_dir
    from ray.cluster_utils import Cluster

    start_fairly()
    Path(get_default_ray_temp_dir()).mkdir(parents=True, exist_ok=True)  # Ray writes the cluster's address there
    head = {"num_cpus": 0, "temp_dir": folder, **OPTIONS}
    return retried(lambda: Cluster(initialize_head=True, head_node_args=head))


def main(folder: str) -> None:
    """Run a cluster until the input ends."""
    cluster = new_cluster(folder)
    nodes = [add_node(cluster, SLOTS) for _ in range(2)]
    print("address", cluster.address, flush=True)
    while not select.select([sys.stdin], [], [], 0.2)[0]:
        for node in [node for node in nodes if node.dead_processes()]:
            nodes.remove(node)
            cluster.remove_node(node, allow_graceful=False)
            nodes.append(add_node(cluster, SLOTS))
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
