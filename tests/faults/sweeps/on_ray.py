"""Kills jobs, their actors and controllers on Ray: `python -m tests.faults.sweeps.on_ray [kills] [seed]`."""

from __future__ import annotations

import contextlib
import signal
import sys

import psutil

from tests.faults.sweeps import ray_cluster, suite
from tests.faults.sweeps.harness import Event, Sweep


class OnRay(Sweep):
    """A sweep whose jobs run on a cluster with two nodes."""

    VICTIMS = ("controller", "actor", "job")
    PHASES = ("begin", "iteration", "save", "trained", "done")

    def victims(self, victim: str, event: Event) -> list[psutil.Process]:
        """Return the processes to be killed. The parent of a job is the process of its actor."""
        if victim == "controller":
            return [psutil.Process(script.pid) for script in self.running()]
        with contextlib.suppress(psutil.Error):
            job = psutil.Process(event[1])
            return [job] if victim == "job" else [parent for parent in job.parents()[:1] if parent.pid != 1]
        return []


def main(count: int = 15, seed: int = 0) -> int:
    """Return the exit code: 0 if nothing is wrong."""
    with ray_cluster.short_folder() as folder, ray_cluster.running(folder) as address:
        OnRay.OPTIONS = ("sweep.executor=ray", f"sweep.ray.address='{address}'")
        return suite.main(count, seed, OnRay, suite.FEW)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))
    sys.exit(main(*map(int, sys.argv[1:])))
