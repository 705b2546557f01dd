"""`hooks=mlflow,wandb,tensorboard`: what the services have of runs that finish or fail, and of sweeps."""

from __future__ import annotations

import re
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.projects import Done, Project
from tests.e2e.trackers.tracked import (
    MLflowRun,
    Points,
    mlflow_run,
    mlflow_runs,
    nearly,
    points,
    tensorboard_points,
    wandb_runs,
)
from tests.processes import until
from tests.tracking.mlflow.server import MLflowServer

ALL = "hooks=mlflow,wandb,tensorboard"
PATIENT = [f"hooks.{name}.flush_timeout=60" for name in ("mlflow", "wandb", "tensorboard")]
"""On a busy machine, MLflow's tables alone take some seconds."""
TROUBLE = '''
from __future__ import annotations

from hydraloop import Hook


class Trouble(Hook):
    """Fails in an iteration."""

    def after_train_iter(self, engine, batch_idx, batch, outputs) -> None:
        if engine.progress.iteration == 15:
            raise ValueError("it went wrong")
'''
SOON = 120.0
"""Seconds within which followers end, also on a busy machine."""


def summary(done: Done, name: str) -> str:
    """A tracker's line at the end."""
    (line,) = re.findall(rf"^{name} +(\S.*)$", done.out, re.M)
    return line


# One run. ------------------------------------------------------------------------------------------------------------


class Tracked:
    """A project with a run of one epoch, which a test resumes for a second one.

    Its code has changes that are not committed.
    """

    def __init__(self, project: Project) -> None:
        self.project = project
        project.commit()
        self.change("first-change")
        self.done = project.train(ALL, "engine.max_epochs=1", *PATIENT)
        assert self.done.code == 0, self.done.text
        self.run = project.run
        self.first = mlflow_run(project.path)

    def resume(self) -> Done:
        """Resume with other options and other code; the code is sent."""
        self.change("second-change")
        code = [f"hooks.{name}.log_code=true" for name in ("mlflow", "wandb")]
        options = ["engine.max_epochs=2", "optimizer.weight_decay=0.02", "resume=auto"]
        return self.project.train(ALL, *options, *code, *PATIENT)

    def change(self, marker: str) -> None:
        """Add a comment to the code."""
        file = self.project.path / "my_project" / "model.py"
        file.write_text(f"{file.read_text()}# {marker}\n")

    def holding(self, marker: str) -> list[str]:
        """Files in the project that contain a marker, except for its code."""
        files = [path for path in self.project.path.rglob("*") if path.is_file() and "my_project" not in path.parts]
        found = [path for path in files if ".git" not in path.parts and marker.encode() in path.read_bytes()]
        return sorted(str(path.relative_to(self.project.path)) for path in found)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    return Tracked(Project.make(tmp_path_factory.mktemp("tracked") / "project"))


@pytest.mark.slow
def test_every_tracker_has_the_whole_run(tracked: Tracked) -> None:
    done, run, project = tracked.done, tracked.run, tracked.project
    expected, count = points(run), len(run.records)
    assert count == 4
    assert {record["mode"] for record in run.records} == {"train", "val", "test"}
    assert not re.search(r"warning:|failed at", done.text), done.text

    shown = f"{count} of {count} records sent, run `mlflow ui` and open http://localhost:5000/#/"
    assert summary(done, "mlflow").startswith(shown)
    found = tracked.first
    assert found.recorded == expected
    assert found.latest.items() >= {key: line[-1] for key, line in expected.items()}.items()
    assert (found.status, found.experiment) == ("FINISHED", "digits")
    assert found.name == run.path.name
    assert found.params["optimizer.lr"] == "0.001"
    assert not [name for name in found.params if name.startswith("hooks.wandb")]
    assert found.tags["command"] == " ".join(
        ["python train.py 'hooks=[mlflow,wandb,tensorboard]' engine.max_epochs=1", *PATIENT]
    )
    assert found.tags.keys() >= {"host", "world_size", "run_dir", "version.torch"}
    assert found.files.is_relative_to(project.path / "mlruns")
    assert {path.name for path in found.files.iterdir()} == {"config.yaml", "result.json"}

    line = summary(done, "wandb")
    assert line.startswith(f"{count} of {count} records sent, wandb sync "), line
    (wandb,) = wandb_runs(run)
    assert wandb.points == expected
    assert (wandb.name, wandb.project, wandb.exit_code) == (found.name, "digits", 0)
    assert wandb.config["optimizer"]["lr"] == 0.001
    assert wandb.uid in line, "the command names the run's folder"

    assert summary(done, "tensorboard").startswith(f"{count} of {count} records sent, tensorboard --logdir outputs/")
    assert nearly(tensorboard_points(run)) == nearly(expected)


@pytest.mark.slow
def test_no_tracker_has_uncommitted_code(tracked: Tracked) -> None:
    """Neither in a database, nor in files to be uploaded, nor in the followers' own files."""
    run = tracked.run
    assert tracked.holding("first-change") == [str((run.path / "code.patch").relative_to(tracked.project.path))]
    assert run.result["git"].keys() == {"commit", "dirty", "patch"}
    assert run.result["git"]["dirty"] is True


@pytest.mark.slow
def test_a_resumed_run_is_the_same_run_everywhere(tracked: Tracked) -> None:
    before, run = tracked.first, tracked.run
    earlier = points(run)
    done = tracked.resume()
    assert done.code == 0, done.text
    expected = points(run)
    count = len(run.records)
    assert count == 7

    found = mlflow_run(tracked.project.path)
    assert (found.uid, found.status) == (before.uid, "FINISHED")
    shown = f"{count} of {count} records sent, run `mlflow ui` and open http://localhost:5000/#/"
    assert summary(done, "mlflow").startswith(shown)
    for key, line in expected.items():
        # MLflow removes no points: the test of the first attempt stays. The validation had the same values.
        assert found.points[key] == ([*earlier[key], *line] if key.startswith("test/") else line), key
        assert found.latest[key] == line[-1], key
    changed = {key: value for key, value in found.params.items() if key.startswith("resume_1/")}
    assert changed == {
        "resume_1/engine.max_epochs": "2",
        "resume_1/optimizer.weight_decay": "0.02",
        "resume_1/resume": "auto",
    }
    assert found.params["optimizer.weight_decay"] == "0.01"

    (wandb,) = wandb_runs(run)
    assert wandb.points == expected
    assert (wandb.name, wandb.exit_code) == (before.name, 0)
    assert wandb.config["resume_1/optimizer/weight_decay"] == 0.02
    assert nearly(tensorboard_points(run)) == nearly(expected)


@pytest.mark.slow
def test_trackers_have_the_code_of_a_run_with_log_code(tracked: Tracked) -> None:
    """After it was resumed with that option and other code."""
    run = tracked.run
    kept = [run.path / "code.patch", run.path / ".hydra" / "resume_1" / "code.patch"]
    assert ["second-change" in path.read_text() for path in kept] == [False, True]
    (stored,) = mlflow_run(tracked.project.path).files.rglob("code.patch")
    assert stored.read_bytes() == kept[1].read_bytes()
    assert stored.parent.name == "resume_1"
    (folder,) = run.path.glob("wandb/offline-run-*/files")
    assert (folder / "code.patch").read_bytes() == kept[0].read_bytes()
    assert (folder / "resume_1" / "code.patch").read_bytes() == kept[1].read_bytes()
    copies = [path for path in (*kept, stored, folder / "resume_1" / "code.patch") if path != kept[0]]
    assert tracked.holding("second-change") == sorted(str(path.relative_to(tracked.project.path)) for path in copies)


# Sweeps, ranks. ------------------------------------------------------------------------------------------------------


@pytest.mark.nightly  # four jobs
def test_a_sweep_of_which_some_jobs_are_tracked(project: Project) -> None:
    for name, cls in (("mlflow", "MLflow"), ("wandb", "Wandb"), ("tensorboard", "TensorBoard")):
        # The project's own options: typed ones would be a mistake in the jobs without the hooks.
        options = f"_target_: hydraloop.hooks.{cls}LoggerHook\nflush_timeout: {SOON}\n"
        project.write(f"conf/hooks/{name}.yaml", f"# @package hooks.{name}\n{options}")
    done = project.train("-m", "optimizer.lr=1e-3,1e-2", "hooks=[],[mlflow,wandb,tensorboard]", "engine.max_epochs=1")
    assert done.code == 0, done.text
    assert "warning:" not in done.text, done.text
    jobs = project.jobs
    (sweep,) = project.path.glob("multirun/*/*")
    parent, *children = mlflow_runs(project.path)
    assert (parent.name, parent.parent, parent.status) == (sweep.name, None, "FINISHED")
    names = [f"lr={lr},hooks=[mlflow,wandb,tensorboard]" for lr in ("0.001", "0.01")]
    assert [child.name for child in children] == names
    for child, job in zip(children, (jobs[1], jobs[3]), strict=True):
        assert (child.parent, child.status) == (parent.uid, "FINISHED")
        assert child.points.items() >= points(job).items()
        assert nearly(tensorboard_points(job)) == nearly(points(job))
    assert parent.points == {}

    uploaded = [wandb_runs(job) for job in jobs]
    assert [len(found) for found in uploaded] == [0, 1, 0, 1]
    one, other = uploaded[1][0], uploaded[3][0]
    assert one.group == other.group == f"{sweep.parent.name}/{sweep.name}"
    assert one.uid != other.uid
    assert [one.name, other.name] == names
    assert (one.points, other.points) == (points(jobs[1]), points(jobs[3]))
    assert not [job for job in (jobs[0], jobs[2]) if (job.path / "tracking").exists()]


@pytest.mark.nightly  # two sweeps
def test_a_sweep_that_is_continued_in_the_background_has_one_parent_run(project: Project) -> None:
    line = ["-m", "hooks=[mlflow]", "hooks.mlflow.flush_timeout=60", "engine.max_iters=2", "hydra.sweep.dir=all"]
    done = project.train(*line, "seed=1,2")
    assert done.code == 0, done.text
    with project.start(*line, "seed=1,2,3", "sweep.resume=all", "detach=true") as process:
        process.communicate(timeout=120)
    assert process.returncode == 0

    def has_three_jobs() -> bool:
        _, *children = mlflow_runs(project.path)
        return [child.status for child in children] == ["FINISHED"] * 3

    until(has_three_jobs, "the last job")
    parent, *children = mlflow_runs(project.path)
    assert (parent.name, {child.parent for child in children}) == ("all", {parent.uid})
    assert [child.name for child in children] == ["seed=1", "seed=2", "seed=3"]


@pytest.mark.nightly  # two processes that import torch
def test_two_ranks_are_one_run(project: Project) -> None:
    done = project.train(ALL, "engine.max_epochs=1", "distributed.nproc_per_node=2", *PATIENT)
    assert done.code == 0, done.text
    run, expected = project.run, points(project.run)
    found = mlflow_run(project.path)
    assert found.status == "FINISHED"
    assert found.tags["world_size"] == "2"
    assert found.points.items() >= expected.items()
    (wandb,) = wandb_runs(run)
    assert wandb.points == expected
    assert nearly(tensorboard_points(run)) == nearly(expected)
    assert [summary(done, name).split(",")[0] for name in ("mlflow", "wandb", "tensorboard")] == [
        f"{len(run.records)} of {len(run.records)} records sent"
    ] * 3


# Runs that end badly. ------------------------------------------------------------------------------------------------


@pytest.mark.nightly  # three runs
def test_how_a_run_ended_is_known_to_mlflow_and_wandb(project: Project) -> None:
    project.write("my_project/trouble.py", TROUBLE)
    patient = PATIENT[:2]
    done = project.train("hooks=mlflow,wandb", *patient, "+hooks.trouble._target_=my_project.trouble.Trouble")
    assert done.code == 1, done.text
    failed = mlflow_run(project.path)
    assert failed.status == "FAILED"
    assert failed.tags["error"] == "ValueError: it went wrong"
    assert failed.recorded == points(project.run), "all records until then"
    assert wandb_runs(project.run)[0].exit_code == 1

    process = started(project, 1)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=SOON)
    assert process.returncode == 130, output
    interrupted = mlflow_runs(project.path)[1]
    assert (interrupted.status, interrupted.tags["status"]) == ("KILLED", "interrupted")
    assert interrupted.recorded == points(project.runs[1])
    assert wandb_runs(project.runs[1])[0].exit_code == 130

    process = started(project, 2)
    process.kill()
    process.communicate()
    run = project.runs[2]
    until(lambda: mlflow_runs(project.path)[2].status != "RUNNING", "its follower reports the end")
    until(lambda: wandb_runs(run)[0].exit_code is not None, "its follower reports the end")
    killed = mlflow_runs(project.path)[2]
    assert (killed.status, killed.tags["status"]) == ("KILLED", "killed")
    assert killed.recorded == points(run)
    assert wandb_runs(run)[0].exit_code == 137

    epochs = max(record["epoch"] for record in run.records) + 1
    done = project.train("hooks=mlflow,wandb", f"engine.max_epochs={epochs}", "resume=auto", *patient)
    assert done.code == 0, done.text
    resumed = mlflow_runs(project.path)[2]
    assert (resumed.uid, resumed.status) == (killed.uid, "FINISHED")
    expected = points(run)
    assert all(_steps(resumed.points, key) >= _steps(expected, key) for key in expected)
    assert all(resumed.latest[key] == line[-1] for key, line in expected.items())
    (wandb,) = wandb_runs(run)
    assert wandb.points == expected


def started(project: Project, number: int) -> subprocess.Popen[str]:
    """Start an endless run; return when some of its records are in MLflow and W&B."""
    process = project.start("hooks=mlflow,wandb", "engine.max_epochs=100000", *PATIENT[:2])
    try:
        until(lambda: len(mlflow_runs(project.path)) > number, "it is at MLflow")
        until(lambda: len(mlflow_runs(project.path)[number].points.get("val/loss", [])) > 1, "its records are there")
        until(lambda: list(project.runs[number].path.glob("checkpoints/last_checkpoint")), "it has a checkpoint")
        until(lambda: wandb_runs(project.runs[number]), "it is in W&B's files")
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return process


def _steps(found: Points, key: str) -> list[int]:
    return sorted({step for step, _ in found.get(key, [])})


# Places. -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow  # a server
def test_a_server_that_is_down_costs_one_warning_and_is_told_later(project: Project, tmp_path: Path) -> None:
    server = MLflowServer(_made(tmp_path / "server"))
    variables = {"MLFLOW_TRACKING_URI": server.uri}
    quick = "hooks.mlflow.flush_timeout=12"  # the run waits so long, which is enough to notice the outage
    done = project.train("hooks=[mlflow,tensorboard]", quick, "engine.max_epochs=2", **variables)
    assert done.code == 0, done.text
    run = project.run
    count = len(run.records)
    (warning,) = [line for line in done.text.splitlines() if "training continues, the records stay" in line]
    problem = f"ConnectionError: cannot reach {server.uri}: Connection refused"
    assert warning == f"warning: mlflow: {problem}; training continues, the records stay in the run directory"
    name = run.path.relative_to(project.path)
    command = f"hydraloop sync {name}"
    told = summary(done, "mlflow")
    assert told == f"0 of {count} records sent ({problem}); {command} sends the rest"
    assert summary(done, "tensorboard").startswith(f"{count} of {count} records sent")

    sync = ["-m", "hydraloop", "sync", str(name)]
    still_down = project.python(*sync, **variables)
    assert still_down.code == 1, still_down.text
    try:
        server.start()
        synced = project.python(*sync, **variables)
        assert synced.code == 0, synced.text
        assert f"{name}  mlflow: {count} sent, {count} of {count} records there, {server.uri}/#/" in synced.out
        again = project.python(*sync, **variables)
        assert f"{name}  mlflow: 0 sent, {count} of {count} records there" in again.out
    finally:
        server.kill()
    found: MLflowRun = mlflow_run(server.folder)
    assert found.status == "FINISHED"
    assert found.recorded == points(run)
    assert not list(project.path.glob("mlflow.db*")), "the variable names the place"


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder
