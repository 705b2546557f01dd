"""The command line with hydra-core 1.4.0rc3 and its omegaconf, in place of the versions in this environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.compat.packages import REPOSITORY, environment
from tests.e2e.projects import Done, Project

SECRET = "9f86d081884c7d659a2feaa0"


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project.make(tmp_path / "project")


def train(project: Project, *arguments: str, code: int = 0) -> Done:
    """A deprecation is an error: 1.4 has deprecated much of 1.3."""
    variables = {**environment("hydra"), "MY_API_KEY": SECRET}
    done = project.python("-W", "error::DeprecationWarning", "train.py", *arguments, **variables)
    assert done.code == code, done.text
    assert "Warning" not in done.text
    assert "Traceback" not in done.text
    return done


@pytest.mark.nightly
def test_a_dry_run(project: Project) -> None:
    before = project.files
    assert "Leave --dry-run out to start" in train(project, "--dry-run", "hooks=ema,profiler").out
    assert project.files == before


@pytest.mark.slow
def test_a_run(project: Project) -> None:
    """The config in its files is masked, after Hydra has written it."""
    done = train(project, "hooks=ema,weight_norm", "engine.max_iters=2", f"experiment_name={SECRET}")
    assert "hooks=[ema,weight_norm]" in done.err
    result = project.run.result
    assert result["status"] == "finished"
    assert (result["versions"]["hydra-core"], result["versions"]["omegaconf"]) == ("1.4.0rc3", "2.4.1rc1")
    assert project.run.config.experiment_name == "***"
    assert all(SECRET not in path.read_text() for path in (project.run.path / ".hydra").iterdir())


@pytest.mark.nightly
def test_ranks(project: Project) -> None:
    train(project, "distributed.nproc_per_node=2", "engine.max_epochs=1")
    assert project.run.result["status"] == "finished"


@pytest.mark.slow
def test_a_sweep(project: Project) -> None:
    train(project, "-m", "hooks=[],[ema]", "engine.max_iters=2")
    assert [job.result["status"] for job in project.jobs] == ["finished"] * 2
    assert [list(job.config.hooks) for job in project.jobs] == [[], ["ema"]]


@pytest.mark.slow
def test_mistakes(project: Project) -> None:
    before = project.files
    done = train(project, "hooks=[ema]", "hooks.ema.momentm=0.1", code=2)
    assert done.err.startswith("error: hooks.ema.momentm: ")
    assert "hooks.ema.momentum" in done.err
    assert train(project, "optimizer.lr=fast", code=2).err.startswith("error: optimizer.lr: ")
    assert project.files == before
    assert train(project, "seed=-1", code=2).err.startswith("error: seed: -1 is out of range")
    assert project.files == before


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("line", "key"),
    [("hooks.ema.momentum=2", "hooks.ema.momentum: "), ("task.metrics.accuracy.top_k=0", "task.metrics.accuracy: ")],
)
def test_a_value_that_a_constructor_refuses(line: str, key: str, project: Project) -> None:
    """1.3 wraps it in another error, 1.4 does not."""
    assert train(project, "hooks=[ema]", line, code=1).err.startswith(f"error: {key}")


@pytest.mark.nightly
def test_the_jobs_of_a_sweep_and_the_limits_of_config_files() -> None:
    tests = ("tests/sweeps/test_grid.py", "tests/cli/test_config_file_limits.py")
    arguments = [sys.executable, "-m", "pytest", *tests, "-W", "ignore:Hydra could not discover"]
    done = subprocess.run(
        arguments, cwd=REPOSITORY, env=os.environ | environment("hydra"), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout
