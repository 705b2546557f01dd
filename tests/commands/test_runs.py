"""`python -m hydraloop runs` on directories as runs, sweeps and other programs leave them."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from hydraloop.commands.command_line import view as main
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
    for age, name in enumerate("cba"):
        os.utime(day / name / ".hydra" / "config.yaml", (1e9 - age, 1e9 - age))
    sweep = written.sweep(tmp_path / "multirun" / "2026-01-02" / "s", "seed=0,1,2")
    written.write(sweep, {0: written.finished(0.97), 1: {"state": "failed", "error": "ValueError"}})
    write(sweep.folder(0), **ended(0.5))  # the state of a job counts
    return tmp_path


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    """Return the names of the runs in the order in which they are listed."""
    assert main(["runs", *arguments, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    return [Path(one["run"]).name for one in answer["runs"]]


def test_the_table_has_the_newest_first(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for attempt, typed in enumerate(("optimizer.lr=0.002", "engine.max_epochs=4", "failed=1"), 1):
        folder = project / "outputs" / "2026-01-01" / "a" / ".hydra" / f"resume_{attempt}"
        folder.mkdir()
        (folder / "overrides.yaml").write_text(f"- {typed}\n")
    (folder / "result.json").write_text("{}")
    assert main(["runs"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "status", "experiment", "best", "time", "typed"]
    typed = "optimizer.lr=0.002 engine.max_epochs=4"  # of all attempts that began
    assert f"  accuracy 0.9500 (no best checkpoint)  4.00s  {typed}" in lines[5]
    words = [line.split() for line in lines[1:]]
    assert [line[0].rpartition("/")[2] for line in words[2:5]] == ["c", "b", "a"]
    assert words[4][:3] == ["outputs/2026-01-01/a", "finished", "digits"]
    assert [line[1] for line in words[2:5]] == ["interrupted", "finished", "finished"]
    assert {line[0]: line[1] for line in words[:2]} == {
        "multirun/2026-01-02/s/0": "finished",
        "multirun/2026-01-02/s/1": "failed",
    }
    assert words[5] == ["5", "runs"]


def test_runs_are_sorted_by_one_metric_also_if_they_were_compared_by_another(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    goal = {"metric": "loss", "rule": "less", "value": 0.3, "iteration": 30}
    day = project / "outputs" / "2026-01-01"
    write(day / "d", status="finished", objective=goal, val_metrics={"accuracy": 0.9, "loss": 0.4})
    assert listed(capsys, "--sort", "accuracy")[:4] == ["0", "a", "d", "b"]
    assert listed(capsys, "outputs", "--sort", "loss")[:1] == ["d"]
    assert set(listed(capsys, "--sort", "accuracy")[4:]) == {"c", "1"}, "those without it"


def test_runs_are_sorted_by_a_metric_of_the_test_and_by_one_that_no_run_was_compared_by(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    day = project / "outputs" / "2026-01-01"
    write(day / "d", **ended(0.9, test_metrics={"accuracy": 0.9, "precision": 0.3}))
    write(day / "e", **ended(0.9, test_metrics={"accuracy": 0.8, "precision": 0.4, "loss": 3.0}))
    assert listed(capsys, "--sort", "test.accuracy")[:2] == ["d", "e"]
    assert listed(capsys, "--sort", "test.precision")[:2] == ["e", "d"]
    assert listed(capsys, "--sort", "test.loss")[0] == "e"
    assert main(["runs", "--sort", "test.precision"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[3] for row in rows[:3]] == ["test.precision", "0.4000", "0.3000"]


def test_a_run_that_was_killed_has_its_last_validation(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    records = [{"mode": "val", "iteration": at, "accuracy": 0.9 + at / 1000, "loss": 0.4} for at in (30, 60)]
    lines = map(json.dumps, [*records, {"mode": "train", "iteration": 70, "loss": 0.3}])
    (project / "outputs" / "2026-01-01" / "c" / "metrics.jsonl").write_text("".join(f"{line}\n" for line in lines))
    assert listed(capsys, "outputs", "--sort", "accuracy") == ["c", "a", "b"]
    for command, shown in (
        (["runs", "outputs"], "accuracy"),
        (["status", "outputs/2026-01-01/c"], "\nvalidation: accuracy"),
    ):
        assert main(command) == 0
        assert f"{shown} 0.9600 (last)" in capsys.readouterr().out


def test_the_json_has_what_selects_runs(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["runs", "outputs", "--json"]) == 0
    found = {Path(one["run"]).name: one for one in json.loads(capsys.readouterr().out)["runs"]}
    assert found["a"]["experiment"] == "digits"
    assert found["b"]["typed"] == ["optimizer.lr=0.1"]
    assert found["a"]["objective"]["value"] == 0.95


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--sort", "acuracy"], "--sort: no run has the metric acuracy\n  Did you mean accuracy?"),
        (["output"], "runs: there is no folder output\n  Did you mean outputs?"),
    ],
)
def test_a_mistake_is_one_message(
    arguments: list[str], message: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["runs", *arguments]) == 2
    assert capsys.readouterr().err.startswith(f"error: {message}")


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
    assert listed(capsys, str(day), "--sort", "accuracy")[0] == "old"
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
        assert "0" in listed(capsys, "multirun"), changed
    (sweep / "sweep.json").write_text("{")
    assert listed(capsys, "multirun") == ["0"]
