"""A real Slurm for tests: Debian's packages, unpacked into a cache folder. Nothing is installed; munge is not needed.

Each node is a namespace of process ids with its own host name, so a node's death kills all of its processes, and
hydraloop sees different machines. The test itself is on the login node.

    def test_a_sweep(slurm: Slurm) -> None:  # the fixture is in conftest.py
        print(slurm.run("squeue"))
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.slurm.accounting import SlurmWithAccounting
from tests.slurm.cluster import CPUS, Slurm

__all__ = ["CPUS", "Slurm", "running"]


@contextmanager
def running(
    folder: Path, nodes: Sequence[str] = ("n1", "n2"), lines: Sequence[str] = (), *, accounting: bool = False
) -> Iterator[Slurm]:
    """Run a cluster in the body. Skip the test, with the reason, where that is not possible."""
    with ExitStack() as stack:
        slurm = (SlurmWithAccounting if accounting else Slurm)(folder, nodes, lines)
        stack.callback(slurm.stop)
        slurm.start()
        yield slurm
