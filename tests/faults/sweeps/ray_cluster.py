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
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

QUIET = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_AUTH_MODE": "disabled", "RAY_gcs_server_port_wait_time_s": "120"}
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


def main(folder: str) -> None:
    """Run a cluster until the input ends."""
    from ray.cluster_utils import Cluster

    start_fairly()
    options = {"include_dashboard": False, "object_store_memory": 80 * 2**20}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "temp_dir": folder, **options})
    nodes = [cluster.add_node(num_cpus=SLOTS, **options) for _ in range(2)]
    print("address", cluster.address, flush=True)
    while not select.select([sys.stdin], [], [], 0.2)[0]:
        for node in [node for node in nodes if node.dead_processes()]:
            nodes.remove(node)
            cluster.remove_node(node, allow_graceful=False)
            nodes.append(cluster.add_node(num_cpus=SLOTS, **options))
    cluster.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
