"""The run directories of jobs, as `hydra.sweep.subdir` names them."""

from __future__ import annotations

from pathlib import Path

from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.e2e.projects import Project

SUBDIR = "hydra.sweep.subdir=${experiment_name}"


def sweep(project: Project, *overrides: str) -> tuple[int, list[tuple[str, str, str]]]:
    """Run a sweep. Returns its exit code, and of each job the state, the directory and the error."""
    fast = ["experiment=spirals", "engine.max_epochs=1", "engine.limit_train_batches=2", "hydra.sweep.dir=named"]
    done = project.train("-m", *fast, SUBDIR, *overrides)
    states = SweepDirectory.load(project.path / "named").states()
    return done.code, [(state.state, state.directory, str(state.error)) for state in states]


def test_a_job_takes_no_other_directory_than_its_own(tmp_path: Path) -> None:
    """Neither another job's, nor one that holds a run, nor one outside the sweep; it keeps its own."""
    project = Project.make(tmp_path / "project")
    project.write("named/held/result.json", "{}")
    code, found = sweep(project, "seed=0,1", "experiment_name=mine,held,../out")
    assert code == 1
    assert [(state, directory) for state, directory, _ in found] == [
        ("finished", "mine"), ("failed", ".jobs/1"), ("failed", ".jobs/2"),
        ("failed", ".jobs/3"), ("failed", ".jobs/4"), ("failed", ".jobs/5"),
    ]  # fmt: skip
    errors = [error for _, _, error in found]
    assert "held holds a run already" in errors[1]
    assert "out is outside the sweep's directory" in errors[2]
    assert "mine is another job's already" in errors[3]
    assert (project.path / "named" / "held" / "result.json").read_text() == "{}"
    assert not (project.path / "out").exists()
    (project.path / "named" / ".jobs" / "0" / "job.json").write_text("{")  # as after a power failure
    _, found = sweep(project, "seed=0,1", "experiment_name=mine,held,../out", "sweep.resume=named")
    assert found[0][:2] == ("finished", "mine")
    assert not (project.path / "named" / "mine" / ".hydra" / "resume_1").exists(), "what is finished does not continue"
