"""`--json`: some commands answer with one document, whose keys `docs/how-to/after_training.md` lists."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.projects import REPOSITORY, Done, Project
from tests.sweeps import written

PAGE = (REPOSITORY / "docs" / "how-to" / "after_training.md").read_text(encoding="utf-8")
AGENTS = (REPOSITORY / "docs" / "agents.md").read_text(encoding="utf-8")
LINES = {
    # in the table of documents: command line
    "`--dry-run`": "train.py --dry-run hooks=ema --json",
    "`runs`": "-m hydraloop runs . --json",
    "`status` of a run": "-m hydraloop status run --json",
    "`status` of a sweep": "-m hydraloop status sweep --json",
    "`results`": "-m hydraloop results sweep --json",
}


@pytest.fixture(scope="module")
def project(trained: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with a run, and a sweep that has not ended."""
    folder = tmp_path_factory.mktemp("json") / "project"
    made = Project(Path(shutil.copytree(trained.path, folder)))
    written.write(written.sweep(folder / "sweep", "seed=0,1"), {0: {"state": "finished", "value": float("nan")}})
    return made


def documents() -> dict[str, set[str]]:
    """The rows of the table: {command line: keys}."""
    (table,) = re.findall(r"^\| `--json` with \| keys \|\n\|---\|---\|\n((?:\|.+\n)+)", PAGE, re.M)
    rows = re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.M)
    return {line: set(re.findall(r"`(\w+)`", keys)) for line, keys in rows}


def answer(done: Done) -> dict[str, Any]:
    """The one document on standard output."""
    assert done.out.count("\n") == 1, done.text
    found: dict[str, Any] = json.loads(done.out, parse_constant=pytest.fail)
    return found


def test_every_row_of_the_table_is_tested() -> None:
    assert set(LINES) == set(documents())


@pytest.mark.parametrize("line", LINES)
def test_a_command_answers_with_the_documented_keys(line: str, project: Project) -> None:
    done = project.python(*LINES[line].split())
    assert set(answer(done)) == documents()[line]
    assert done.code == 0


def test_status_says_of_a_run_what_runs_says(project: Project) -> None:
    (row,) = answer(project.python("-m", "hydraloop", "runs", "run", "--json"))["runs"]
    said = answer(project.python("-m", "hydraloop", "status", "run", "--json"))["run"]
    assert row["typed"]
    assert said == {**row, "reason": None, "iteration": row["progress"]["iteration"]}


def test_the_example_for_agents_is_what_is_printed(project: Project) -> None:
    (shown,) = re.findall(r"^\{\"error\".*\}$", AGENTS, re.M)
    assert project.train("--json", "optimizr.lr=1e-2").out == f"{shown}\n"


ERRORS = {
    # command line: (key, remedy)
    "train.py --json --dry-run hooks=emaa": ("hooks", "Did you mean ema?"),
    "train.py --json -cn confg": ("--config-name", "Did you mean config?"),
    "train.py --json seed=1": ("--json", "add --dry-run"),
    "train.py --json -m seed=1,2": ("--json", "add --dry-run"),
    "train.py --json --help": ("--json", "add --dry-run"),
    "train.py --json --cfg job": ("--json", "add --dry-run"),
    "train.py evaluate run --json": ("--json", "Leave it out."),
    "-m hydraloop status sweeep --json": ("directory", "Did you mean sweep?"),
}


@pytest.mark.parametrize("line", ERRORS)
def test_a_mistake_has_its_key_and_remedy(line: str, project: Project) -> None:
    key, remedy = ERRORS[line]
    done = project.python(*line.split())
    error = answer(done)["error"]
    assert (done.code, error["key"], set(error)) == (2, key, {"key", "problem", "remedy"}), done.text
    assert remedy in error["remedy"].replace(f"{project.path}/", "")
    assert not done.err
    assert not (project.path / "outputs").exists()
