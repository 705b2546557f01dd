"""`python -m hydraloop diff A B` on run directories as runs leave them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hydraloop.commands.dispatch import run as command

PATCH = "# Changes since commit 61afeaf in files that git tracks.\ndiff --git a/same.py b/same.py\n+a\n"
CONFIG = "engine: {max_epochs: %s, length: '${engine.max_epochs}'}\nresume: %s\n"


def run(path: Path, *, epochs: int = 2, patch: str = "", losses: tuple[Any, ...] = (1.5, 1.25), **result: Any) -> Path:
    """A finished run."""
    (path / ".hydra").mkdir(parents=True)
    (path / ".hydra" / "config.yaml").write_text(CONFIG % (epochs, "auto" if path.name == "b" else "null"))
    records = [
        {"mode": "train", "iteration": number, "time": len(path.name) * number, "loss": loss, "lr": 0.1}
        for number, loss in enumerate(losses, start=1)
    ]
    (path / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in records))
    if patch:
        (path / "code.patch").write_text(PATCH + patch)
    git = {"commit": "61afeaf061", "dirty": bool(patch)} | ({"patch": f"{len(patch)}"} if patch else {})
    best = {"metric": "loss", "value": 1.25, "iteration": 2, "checkpoint": str(path / "best.pth")}
    result = {"status": "finished", "best": best, "versions": {"torch": "2.13.0"}, "git": git, **result}
    (path / "result.json").write_text(json.dumps(result))
    return path


def diff(*runs: Path) -> int:
    return command(["diff", *map(str, runs)])


def test_equal_runs_have_no_differences(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = (1.5, None)
    assert diff(run(tmp_path / "a", losses=losses), run(tmp_path / "b", losses=losses, seconds=3.0)) == 0
    assert capsys.readouterr().out == "no differences: config, code, packages, results, records\n"


def test_escape_sequences_in_files_do_not_reach_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    a, b = (run(tmp_path / name, reason=f"{name}\x1b]0;title\x07", val_metrics={"\x9b2J": len(name)}) for name in "ab")
    (b / ".hydra" / "config.yaml").write_text('name: "\\e[2J"\n')
    (b / "result.json").write_text((b / "result.json").read_text().replace("\\u009b2J", "\\u009bx"))
    assert diff(a, b) == 1
    said = capsys.readouterr().out
    assert "reason: a\\x1b]0;title\\x07 -> b" in said
    assert "\\x9b2J" in said
    assert [text for text in ("\x1b", "\x07", "\x9b") if text in said] == []


def test_each_difference_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = run(tmp_path / "a", patch="diff --git a/x.py b/x.py\n+1\n", val_metrics={"loss": 1.0})
    later = {"versions": {"torch": "2.14.0"}, "val_metrics": {"loss": 0.5}}
    b = run(tmp_path / "b", epochs=3, patch="diff --git a/x.py b/x.py\n+22\n", losses=(1.5, 1.75, 1), **later)
    assert diff(a, b) == 1
    assert capsys.readouterr().out.splitlines() == [
        "config    engine.max_epochs: 2 -> 3",
        "          engine.length: 2 -> 3",
        "code      code: uncommitted changes 28 -> uncommitted changes 29, since commit 61afeaf061",
        "          code: the uncommitted changes of x.py differ",
        "packages  torch: 2.13.0 -> 2.14.0",
        "results   val_metrics.loss: 1.0 -> 0.5",
        "records   first at iteration 2, mode train: train/loss: 1.25 -> 1.75 (+0.5)",
    ]


def test_a_record_that_one_run_lacks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert diff(run(tmp_path / "a"), run(tmp_path / "b", losses=(1.5,))) == 1
    assert (
        capsys.readouterr().out
        == f"records   first at iteration 2, mode train: only {tmp_path / 'a'} has this record\n"
    )


def test_a_killed_run_without_a_checkpoint_is_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = run(tmp_path / "a", best=None), run(tmp_path / "b")
    (b / "result.json").unlink()
    assert diff(a, b) == 1
    assert capsys.readouterr().out == "results   status: finished -> killed\n"
