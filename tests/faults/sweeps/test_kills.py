"""Sweeps whose processes are killed end as one that was never interrupted, and a job ends once."""

from __future__ import annotations

from collections import deque
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.faults.sweeps import on_ray, on_slurm, suite
from tests.faults.sweeps.harness import Kill, Sweep, make
from tests.faults.sweeps.judge import problems, problems_of_jobs
from tests.processes import until

SERVER_IS_KILLED_BEFORE_IT_ANSWERS = """
import os, signal, time
from pathlib import Path
from unittest import mock

from hydraloop.sweeps.executors import fork_server

started, is_killed = fork_server.started, Path("is_killed")

def kill(pid: int) -> object:
    if is_killed.exists():
        return started(pid)
    is_killed.touch()
    ledger = Path("ask/ledger")
    while not (ledger.exists() and {phase!r} in ledger.read_text()):
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGKILL)

mock.patch("hydraloop.sweeps.executors.fork_server.started", kill).start()
"""
WITHOUT_LOCKS = """
from unittest import mock

mock.patch("filelock.FileLock.acquire").start()
mock.patch("hydraloop.files.lock._is_held", lambda path: False).start()
"""


@pytest.mark.slow
def test_kills_lose_and_double_nothing_and_a_second_controller_is_refused(tmp_path: Path) -> None:
    kills = [
        Kill("controller", "written"),
        Kill("job", "save"),
        Kill("fork server", "iteration", 2),
        Kill("sender", "iteration", 3),
        Kill("everything", "trained"),
    ]
    project = make(tmp_path / "project")
    quiet, killed = (Sweep(project, name, suite.KINDS["a grid"]) for name in ("quiet", "killed"))
    quiet.train(deque(), together=2)
    assert quiet.refused == 1
    killed.train(deque(kills))
    assert all(killed.killed[kill.victim] == 1 for kill in kills)
    assert list(problems(killed, quiet)) == []


@pytest.mark.slow
def test_a_rank_that_is_killed_after_the_result_does_not_repeat_the_job(tmp_path: Path) -> None:
    sweep = Sweep(make(tmp_path / "project"), "ranks", ("seed=0", "distributed.nproc_per_node=2"))
    sweep.train(deque([Kill("rank", "done")]))
    assert sweep.killed["rank"] == 1
    assert list(problems(sweep, sweep)) == []


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["iteration 2", "done"])
def test_a_job_that_two_servers_have_started_runs_once(phase: str, tmp_path: Path) -> None:
    """The first one is killed before it can say that it has started the job. The second one starts it again."""
    project = make(tmp_path / "project", before=SERVER_IS_KILLED_BEFORE_IT_ANSWERS.replace("{phase!r}", repr(phase)))
    sweep = Sweep(project, "ask", ("seed=0", "engine.max_iters=240", "engine.val_interval=60"))
    sweep.train(deque())
    assert list(problems(sweep, sweep)) == []
    names = [event for _, _, event in sweep.events()]
    assert names.count("iteration 1") == 1


@pytest.mark.nightly
def test_jobs_that_run_twice_at_a_time_are_noticed(tmp_path: Path) -> None:
    project = make(tmp_path / "project", before=WITHOUT_LOCKS)
    sweep = Sweep(project, "unlocked", ("seed=0", "+hooks.ledger.together=true"))
    sweep.start()
    until(sweep.events, "the job does not begin")
    sweep.train(deque())
    assert "doubled" in {kind for kind, _ in problems_of_jobs(sweep.answer("status")["jobs"], sweep.events())}


@pytest.mark.nightly
def test_random_kills() -> None:
    assert suite.main(count=60, seed=1) == 0


@pytest.mark.nightly
def test_kills_on_slurm() -> None:
    assert on_slurm.main(count=20, seed=1) == 0


@pytest.mark.nightly
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install ray")
def test_kills_on_ray() -> None:
    assert on_ray.main(count=15, seed=1) == 0
