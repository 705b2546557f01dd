"""torchrun's elastic agents: when one of two nodes is lost, the run continues on the other one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist

from tests.e2e.projects import REPOSITORY, Project, Run
from tests.faults.comparison import ledger
from tests.faults.harness import PATIENCE, make, seen
from tests.faults.test_elastic import assert_covered, samples
from tests.processes import until

LINE = ("experiment=faults", "data.train.samples=800", "hydra.run.dir=run", "data.loader.batch_size=4")
RENDEZVOUS = "join_timeout=60,last_call_timeout=10,keep_alive_interval=1,keep_alive_max_attempt=2"


def agent(project: Project, port: int, *overrides: str) -> subprocess.Popen[str]:
    """Start a torchrun with one rank."""
    options = ("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3", "--local-addr=127.0.0.1", "--rdzv-id=faults")
    rendezvous = ("--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}", f"--rdzv-conf={RENDEZVOUS}")
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options, *rendezvous, "train.py", *LINE, *overrides],
        cwd=project.path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def lose(agents: list[subprocess.Popen[str]], rank: str) -> subprocess.Popen[str]:
    """Kill the agent of a rank, and the rank. Returns the other agent."""
    for number, lost in enumerate(agents):
        ranks = psutil.Process(lost.pid).children()
        if [child.environ()["RANK"] for child in ranks] == [rank]:
            for process in (psutil.Process(lost.pid), *ranks):
                process.kill()
            lost.communicate()
            return agents[1 - number]
    raise AssertionError(f"rank {rank} does not run")


@pytest.mark.nightly
@pytest.mark.parametrize(("rank", "overrides"), [("1", ()), ("0", ("resume=auto",))])
def test_a_run_continues_without_a_lost_node(rank: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    """The store of the rendezvous is on neither node."""
    project = make(tmp_path / "project")
    run = Run(project.path / "run")
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    agents = [agent(project, store.port, *overrides) for _ in range(2)]
    try:
        until(lambda: seen(run.path / "witness").count("iteration") >= 20, "training has begun")
        left = lose(agents, rank)
        output = left.communicate(timeout=PATIENCE)[0]
    finally:
        for process in agents:
            process.terminate()
    assert left.returncode == 0, output
    resumed = re.search(r"resumed at (\d+)", output)
    assert resumed is not None, output
    begin = int(resumed[1])
    assert begin > 0
    seen_by_both = {line["iteration"] for line in ledger(run).values() if line["rank"] == 1}
    assert set(range(1, begin + 1)) <= seen_by_both, "both ranks trained"
    assert_covered(samples(run, alone_from=begin), epochs=2, samples=800, repeated=4)
