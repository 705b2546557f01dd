"""The Slurm of the tests: its nodes are different machines, and die."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.processes import until
from tests.slurm import Slurm


@pytest.mark.slow
def test_a_step_has_two_nodes(slurm: Slurm) -> None:
    assert sorted(slurm.run("srun", "-N2", "hostname").split()) == ["n1", "n2"]


@pytest.mark.nightly
def test_the_job_of_a_dead_node_starts_on_the_other_one(slurm: Slurm, tmp_path: Path) -> None:
    began = tmp_path / "began"
    words = ("--parsable", "--requeue", f"--output={tmp_path}/log", f"--wrap=hostname >>{began}; sleep 300")
    job = slurm.run("sbatch", *words).strip()
    until(lambda: began.exists() and began.read_text(), "the job does not start")
    (first,) = began.read_text().split()
    slurm.kill_node(first)
    until(lambda: began.read_text().count("\n") == 2, slurm.run("scontrol", "show", "job", job))
    (second,) = set(began.read_text().split()) - {first}
    assert slurm.state(job) == "RUNNING"
    assert [node.name() for node in slurm.processes(second)].count("slurm_script") == 1
