"""`python -m hydraloop runs` on directories as runs, sweeps and other programs leave them."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from hydraloop.commands.dispatch import run as main
from hydraloop.commands.runs import cleanup
from hydraloop.run_files.lock import RunLock
from tests.e2e.projects import Project
from tests.sweeps import written

CONFIG = """\
seed: {seed}
experiment_name: digits
optimizer:
  _target_: torch.optim.AdamW
  lr: {lr}
  betas:
  - 0.9
  - 0.999

scheduler:
  cosine: {{end: '${{engine.max_epochs}}'}}
engine: {{max_epochs: 3}}
hooks: {hooks}
"""
EMA = "{ema: {momentum: 0.1}, wandb: {tags: [baseline]}, mlflow: {tags: {team: a}}}"


def write(path: Path, *, lr: str = "0.001", hooks: str = "{}", seed: int = 0, **result: Any) -> Path:
    """Write the files of a run."""
    (path / ".hydra").mkdir(parents=True)
    (path / ".hydra" / "config.yaml").write_text(CONFIG.format(lr=lr, hooks=hooks, seed=seed))
    (path / ".hydra" / "overrides.yaml").write_text(f"- optimizer.lr={lr}\n")
    if result:
        (path / "result.json").write_text(json.dumps({"seconds": 4.0, "progress": {"iteration": 30}, **result}))
    return path


def ended(accuracy: float, **more: Any) -> dict[str, Any]:
    goal = {"metric": "accuracy", "rule": "greater", "value": accuracy, "iteration": 30}
    return {"status": "finished", "objective": goal, "val_metrics": {"accuracy": 0.1, "loss": 2.0}, **more}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project with two finished runs, one that was killed, and a sweep of two jobs, in the working directory."""
    monkeypatch.chdir(tmp_path)
    day = tmp_path / "outputs" / "2026-01-01"
    write(day / "a", hooks=EMA, **ended(0.95))
    write(day / "b", lr="0.1", **ended(0.85, error="it is here"))
    write(day / "c", seed=7)
    sweep = written.sweep(tmp_path / "multirun" / "2026-01-02" / "s", "seed=0,1,2")
    written.write(sweep, {0: written.finished(0.97), 1: {"state": "failed", "error": "ValueError"}})
    write(sweep.folder(0), **ended(0.5))  # the state of a job counts
    return tmp_path


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the names of the runs in the order in which they are listed."""
    assert main(["runs", *arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["command"]) == (1, "runs")
    return [Path(one["run"]).name for one in answer["runs"]]


@pytest.mark.parametrize(
    ("condition", "names"),
    [
        ('accuracy > 0.9 and "ema" in hooks', "a"),
        ("accuracy > 0.9", "a 0"),
        ("optimizer.lr < 0.01 and not job", "a c"),
        ("optimizer.betas == [0.9, 0.999] and hooks.ema.momentum > 0.05", "a"),
        ("scheduler.cosine.end == 3 and engine.max_epochs == 3 and seed == 7", "c"),
        ("status == 'interrupted' or status == 'failed'", "c 1"),
        ("accuracy > 0.9 or seed == 7", "a c 0"),
        ("'baseline' in tags and 'team=a' in tags", "a"),
        ("size > 100 and seconds < 5 and days < 1 and experiment == 'digits' and loss == 2", "a b 0"),
        ("iteration == 30 and 'optimizer.lr=0.1' in typed", "b"),
    ],
)
def test_a_condition_selects_runs(
    condition: str, names: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert listed(capsys, condition) == names.split()


def test_the_table_and_the_order(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "status", "experiment", "best", "time", "size", "tags", "typed"]
    words = [line.split() for line in lines[1:]]
    assert words[0][:6] == ["outputs/2026-01-01/a", "finished", "digits", "accuracy", "0.9500", "4.00s"]
    assert words[0][-4:] == ["KiB", "baseline,", "team=a", "optimizer.lr=0.001"]
    assert [line[1] for line in words[:5]] == ["finished", "finished", "interrupted", "finished", "failed"]
    assert words[4][0] == "multirun/2026-01-02/s/1"
    assert words[5][:2] == ["5", "runs,"]
    assert listed(capsys, "outputs", "--sort", "optimizer.lr") == ["a", "c", "b"]
    assert listed(capsys, "--sort", "accuracy") == ["0", "a", "b", "c", "1"]  # the best first
    assert listed(capsys, "--sort", "value", "--reverse") == ["b", "a", "0", "c", "1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["acuracy > 0.9"], "runs: no run has acuracy\n    acuracy > 0.9\n    ^\n  Did you mean accuracy?"),
        (["loss < 1 and seed < "], "condition: loss < 1 and seed < is not a condition\n"),
        (["loss < 1 and f(1)"], "f(1) cannot be part of a condition\n    loss < 1 and f(1)\n                 ^\n"),
        (["status > 3"], "status > 3 cannot be evaluated"),
        (["--sort", "nothing"], "no run has nothing"),
        (["--sort", "hooks.ema"], "have no order"),
        (["outputs", "multirun"], "there are two folders"),
        (["seed == 0", "output"], "there are two conditions, or a folder that does not exist"),
        (["--delete", "--yes"], "--delete: no condition says which runs"),
        (["--delete", "seed == 7"], "--delete: it asks before it changes 1 run"),
        (["--prune-checkpoints", "--all", "--json"], "nobody can answer"),
    ],
)
def test_a_mistake_is_one_message(
    arguments: list[str], message: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(project.rglob("*"))
    write(project / "outputs" / "d", hooks="{ema: {momentum: 0.2}}")
    assert main(["runs", *arguments]) == 2
    said = capsys.readouterr().err
    assert said.count("error: ") == 1
    assert message in said
    assert sorted(path for path in project.rglob("*") if "outputs/d" not in str(path)) == before


def test_a_wrong_name_has_a_command_that_works(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "loss == 2 and acuracy > 0.9", "--json"]) == 2
    error = json.loads(capsys.readouterr().out)["error"]
    assert (error["code"], error["key"]) == ("unknown_key", "runs")
    assert error["command"] == ["python", "-m", "hydraloop", "runs", "loss == 2 and accuracy > 0.9", "--json"]


def test_a_broken_or_foreign_directory_is_one_row(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    day = project / "outputs" / "2026-02-02"
    for name, content in {
        "empty": "",
        "torn": '{"status": "finis',
        "list": "[1]",
        "odd": '{"status": "finished", "progress": [1], "seconds": "x", "objective": {"metric": [], "value": 1}}',
        "old": '{"status": "finished", "val_metrics": {"accuracy": 0.4}}',
    }.items():
        (day / name).mkdir(parents=True)
        (day / name / "result.json").write_text(content)
    (day / "other" / ".hydra").mkdir(parents=True)
    (day / "other" / ".hydra" / "config.yaml").write_text("model: \x00: [\n")
    (day / "other" / ".hydra" / "overrides.yaml").write_bytes(b"\xff\xfe[")
    (day / "texts").mkdir()
    (day / "texts" / ".hydra").mkdir()
    (day / "texts" / ".hydra" / "config.yaml").write_text("experiment_name: [\nhooks: x: y\nseed: 1\n")
    (day / "loop").symlink_to(day)
    assert main(["runs", str(day)]) == 0
    rows = {Path(line.split()[0]).name: line.split()[1] for line in capsys.readouterr().out.splitlines()[1:-1]}
    damaged = dict.fromkeys(("empty", "torn", "list", "odd", "other"), "unknown")
    assert rows == damaged | {"old": "finished", "texts": "interrupted"}
    assert listed(capsys, "accuracy > 0.3", str(day)) == ["old"]
    sweep = project / "multirun" / "2026-01-02" / "s"
    state = (sweep / "1" / "job.json").read_text()
    for changed in (
        '"seconds": []',
        '"directory": "../../../outputs"',
        '"directory": 1',
        '"state": {}',
        '"overrides": [1]',
    ):
        name = changed.partition(":")[0]
        (sweep / "1" / "job.json").write_text(re.sub(rf'{name}: ("[^"]*"|\[\]|[\d.]+)', changed, state, count=1))
        assert "0" in listed(capsys, "multirun", "job"), changed
    (sweep / "sweep.json").write_text("{")
    assert listed(capsys, "multirun", "job") == ["0"]


def test_only_runs_are_deleted(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A job, a run that runs, one with another run in it, links, and what is outside of `outputs/` stay."""
    outputs = project / "outputs"
    write(outputs / "outer", **ended(0.1))
    write(outputs / "outer" / "inner")
    outside = write(project / "elsewhere" / "run", **ended(0.1))
    (outputs / "linked").symlink_to(outside)
    (outputs / "2026-01-01" / "a" / "link").symlink_to(outside)
    (outputs / ".hydraloop-trash-0").mkdir()
    with RunLock(outputs / "2026-01-01" / "c", key=""):
        assert main(["runs", "--delete", "--all", "--yes"]) == 1
        assert main(["runs", "outputs/linked", "--delete", "--all", "--yes"]) == 1
        assert main(["runs", "elsewhere", "--delete", "--all", "--yes"]) == 1
        assert main(["runs", "outputs/../elsewhere", "--delete", "--all", "--yes"]) == 1
    said = capsys.readouterr().out
    for reason in ("a job of a sweep", "it is running", "another run is in", "it is a link", "outside of outputs/"):
        assert reason in said
    assert sorted(path.name for path in outputs.iterdir()) == ["2026-01-01", "linked", "outer"]
    assert [path.name for path in (outputs / "2026-01-01").iterdir()] == ["c"]
    assert (outputs / "outer" / "inner" / ".hydra").is_dir()
    assert (outside / "result.json").exists()
    assert (project / "multirun" / "2026-01-02" / "s" / "0" / "job.json").exists()


@pytest.mark.parametrize("answer", ["y\n", "\n"])
def test_it_asks_in_a_terminal(answer: str, project: Path) -> None:
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "hydraloop", "runs", "accuracy < 0.9 and not job", "--delete"]
    process = subprocess.Popen(command, stdin=theirs, stdout=subprocess.PIPE, text=True)
    os.write(ours, answer.encode())
    said, _ = process.communicate(timeout=60)
    os.close(ours)
    os.close(theirs)
    assert "outputs/2026-01-01/b" in said
    assert "Delete 1 run, 0." in said
    assert process.returncode == 0
    assert (project / "outputs" / "2026-01-01" / "b").exists() == (answer != "y\n")
    assert (project / "outputs" / "2026-01-01" / "a").exists()


def test_a_pruned_run_keeps_the_last_and_the_best_and_resumes(trained: Project, tmp_path: Path) -> None:
    project = Project(tmp_path / "project")
    shutil.copytree(trained.path, project.path, ignore=shutil.ignore_patterns("run"))
    shutil.copytree(trained.path / "run", project.path / "outputs" / "run")
    folder = project.path / "outputs" / "run" / "checkpoints"
    before = {path.name for path in folder.glob("*.pth")}
    done = project.python("-m", "hydraloop", "runs", "--prune-checkpoints", "--all", "--yes")
    assert done.code == 0, done.text
    left = {path.name for path in folder.glob("*.pth")}
    assert left == {name for name in before if name.startswith("best_")} | {"epoch_4.pth"}
    assert len(left) == 2
    assert " MiB freed" in done.out or " KiB freed" in done.out
    again = project.python("-m", "hydraloop", "runs", "--prune-checkpoints", "--all", "--yes")
    assert "0.0 KiB freed" in again.out
    resumed = project.train("resume", "outputs/run", "engine.max_epochs=5")
    assert resumed.code == 0, resumed.text
    assert (folder / "epoch_5.pth").exists()


def test_jobs_are_pruned_but_not_while_their_sweep_runs(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "multirun", "--prune-checkpoints", "--all", "--yes"]) == 0
    with RunLock(project / "multirun" / "2026-01-02" / "s", key=""):
        assert main(["runs", "multirun", "--prune-checkpoints", "--all", "--yes"]) == 1
    assert "its sweep is running" in capsys.readouterr().out


@pytest.mark.parametrize("starts", [True, False], ids=["it runs", "it has run"])
def test_a_run_that_is_resumed_while_it_asks_is_not_deleted(
    starts: bool, project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = project / "outputs" / "2026-01-01" / "c"
    lock = RunLock(run, key="")

    def answer(*_: Any) -> bool:
        if starts:
            lock.acquire()
        else:
            (run / "metrics.jsonl").write_text("{}\n")
        return True

    monkeypatch.setattr(cleanup, "_agreed", answer)
    assert main(["runs", "seed == 7", "--delete"]) == 1
    lock.release()
    assert "it has changed since it was listed" in capsys.readouterr().err
    assert (run / ".hydra" / "config.yaml").exists()
