"""`--json`: each command answers with one document, whose keys `docs/reference/json.md` lists."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hydraloop import json_answers
from tests.e2e.projects import REPOSITORY, Done, Project
from tests.marks import slow
from tests.processes import until
from tests.sweeps import written

PAGE = (REPOSITORY / "docs" / "reference" / "json.md").read_text(encoding="utf-8")
LINES = {
    # in the table of documents: command line
    "`--help`": "train.py --help --json",
    "`--help NAME …`": "train.py --help hooks hooks.ema optimizer.lr engine experiment.spirals --json",
    "`--dry-run`": "train.py --dry-run hooks=ema --json",
    "a run": "train.py --json engine.max_iters=2 data.val=null data.test=null default_hooks.progress=null",
    "a sweep, `results`": "train.py -m seed=0,1 engine.max_iters=2 hydra.sweep.dir=done --json",
    "`runs`": "-m hydraloop runs . --json",
    "`status` of a run": "-m hydraloop status run --json",
    "`status` of a sweep": "-m hydraloop status sweep --json",
    "`report`": "-m hydraloop report run --json",
    "`check`": "-m hydraloop check --json",
    "`new`": "-m hydraloop new fresh --json",
    "`evaluate`, `predict`, `export`": "-m hydraloop evaluate run --json",
    "`stop`": "-m hydraloop stop run --json",
    "`detach=true`": "train.py --json engine.max_iters=2 detach=true hydra.run.dir=away",
    "`attach`, `sync`": "-m hydraloop attach run --json",
}
SLOW = ("a sweep, `results`", "`check`", "`report`")


@pytest.fixture(scope="module")
def project(trained: Project, tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project with a run, and a sweep that has not ended."""
    folder = tmp_path_factory.mktemp("json") / "project"
    made = Project(Path(shutil.copytree(trained.path, folder)))
    written.write(written.sweep(folder / "sweep", "seed=0,1"), {0: {"state": "finished", "value": float("nan")}})
    return made


def documents() -> dict[str, tuple[str, set[str]]]:
    """The rows of the table: {command line: (command, other keys)}."""
    rows = re.findall(r"^\| (.+?) \| (.+?) \| (.+?) \|$", PAGE.partition("## Documents")[2], re.M)
    return {line: (command.strip("`"), set(re.findall(r"`(\w+)`", keys))) for line, command, keys in rows[1:]}


def answer(done: Done) -> dict[str, Any]:
    """The one document on standard output."""
    assert done.out.count("\n") == 1, done.text
    found: dict[str, Any] = json.loads(done.out, parse_constant=pytest.fail)
    assert found.pop("schema") == json_answers.SCHEMA
    return found


@pytest.mark.parametrize("line", [slow(line) if line in SLOW else line for line in LINES])
def test_a_command_answers_with_the_documented_keys(line: str, project: Project) -> None:
    command, keys = documents()[line]
    done = project.python(*LINES[line].split())
    found = answer(done)
    assert done.code == 0, done.text
    if line == "`stop`":
        command, keys = documents()["`status` of a run"]
    assert found.pop("command") == (command if command != "as typed" else LINES[line].split()[2])
    assert set(found) == keys
    if command == "detach":
        until((project.path / "away" / "result.json").exists, "the run in the background has ended")


def test_every_row_of_the_table_is_tested() -> None:
    assert set(LINES) == set(documents())


@pytest.mark.parametrize("save_best", ["null", "accuracy"])
def test_a_result_has_one_number_to_compare_with_its_name_and_direction(save_best: str, project: Project) -> None:
    line = ["engine.max_epochs=1", "data.test=null", f"default_hooks.checkpoint.save_best={save_best}", "--json"]
    objective = answer(project.train(*line))["result"]["objective"]
    assert (objective["metric"], objective["rule"]) == ("accuracy", "greater")
    assert 0 < objective["value"] < 1


def test_the_examples_of_the_page_are_what_is_printed(project: Project) -> None:
    shown = re.findall(r"^\{\"schema\".*?\}$", PAGE, re.M | re.S)
    explained = project.train("--help", "weights", "--json")
    mistaken = project.train("optimizr.lr=0.1", "--json")
    assert [json.loads(text) for text in shown] == [json.loads(done.out) for done in (explained, mistaken)]
    assert mistaken.code == 2
    assert "error: optimizr.lr" in mistaken.err


ERRORS = {
    # command line: (exit code, key, remedy)
    "train.py --json --dry-run hooks=emaa": (2, "hooks", "Did you mean ema?"),
    "train.py --json -cn confg": (2, "--config-name", "Did you mean config?"),
    "train.py --json hooks=weight_norm +hooks.weight_norm.digts=3": (
        1,
        "hooks.weight_norm.digts",
        "Did you mean digits?",
    ),
    "-m hydraloop statsu run --json": (2, None, "Did you mean status?"),
    "-m hydraloop status sweeep --json": (2, "directory", "Did you mean sweep?"),
    "-m hydraloop evaluate run split=tset --json": (1, "split", "Did you mean test?"),
}


@pytest.mark.parametrize("line", ERRORS)
def test_an_error_has_its_key_and_remedy(line: str, project: Project) -> None:
    code, key, remedy = ERRORS[line]
    done = project.python(*line.split())
    error = answer(done)["error"]
    assert done.code == code, done.text
    assert (error["key"], set(error)) == (key, {"key", "problem", "remedy"})
    assert remedy in error["remedy"].replace(f"{project.path}/", "")


def test_an_error_of_the_run_itself_and_a_masked_secret(project: Project) -> None:
    project.write("breaks.py", "def breaks():\n    raise RuntimeError('api_key=hunter2-0123456789')\n")
    done = project.train("--json", "data=base", "data.train={_target_:breaks.breaks}")
    error = answer(done)["error"]
    assert (done.code, error["key"], error["remedy"]) == (1, None, None)
    assert "hunter2" not in done.text
