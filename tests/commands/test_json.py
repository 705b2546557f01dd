"""`--json`: each command answers with one document, whose keys `docs/reference/json.md` lists."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest

from hydraloop import json_answers, repairs
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
    codes = set(re.findall(r"`(\w+)`", PAGE.partition("| code | mistake |")[2].replace("`key=value`", "")))
    assert codes == {*repairs.CODES, "invalid", "failed", "interrupted"}


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
    # command line: (exit code, code, the corrected arguments)
    "train.py --json --dry-run hooks=emaa": (2, "unknown_option", "train.py --json --dry-run hooks=ema"),
    "train.py --json -cn confg": (2, "not_found", "train.py --json -cn config"),
    "train.py --json --config-path=cnf": (2, "not_found", "train.py --json --config-path=conf"),
    "train.py --json --cfg job seed=1": (2, "invalid", "train.py --json --dry-run seed=1"),
    "train.py --json detach=true resume=gone": (2, "not_found", "train.py --json detach=true"),
    "train.py --json --lr 0.1": (2, "unknown_flag", "train.py --json optimizer.lr=0.1"),
    "train.py --json seed=2 --lr 0.1": (2, "unknown_flag", "train.py --json seed=2 optimizer.lr=0.1"),
    "train.py --json --help hooks.emma": (2, "unknown_key", "train.py --json --help hooks.ema"),
    "train.py --json hooks=weight_norm +hooks.weight_norm.digts=3": (
        1,
        "unknown_key",
        "train.py --json hooks=weight_norm +hooks.weight_norm.digits=3",
    ),
    "train.py --json load_from=gone.pth": (1, "not_found", "train.py --json"),
    "train.py --json load_from=run/checkpoints/epoch_44.pth": (
        1,
        "not_found",
        "train.py --json load_from=run/checkpoints/epoch_4.pth",
    ),
    "-m hydraloop statsu run --json": (2, "invalid", "-m hydraloop status run --json"),
    "-m hydraloop status sweeep --json": (2, "not_found", "-m hydraloop status sweep --json"),
    "-m hydraloop evaluate run split=tset --json": (1, "unknown_option", "-m hydraloop evaluate run split=test --json"),
    "-m hydraloop export run --format ptt2 --json": (
        2,
        "unknown_option",
        "-m hydraloop export run --format pt2 --json",
    ),
    "-m hydraloop new run --json": (2, "invalid", "-m hydraloop new run_2 --json"),
}


@pytest.mark.parametrize("line", ERRORS)
def test_an_error_has_its_code_and_the_corrected_command(line: str, project: Project) -> None:
    code, kind, corrected = ERRORS[line]
    done = project.python(*line.split())
    error = answer(done)["error"]
    assert (done.code, error["code"]) == (code, kind), done.text
    words = error["command"] and [word.replace(f"{project.path}/", "") for word in error["command"]]
    assert words == (None if corrected is None else ["python", *corrected.split()])
    assert set(error) == {"code", "key", "problem", "remedy", "command"}


def test_an_error_of_the_run_itself_and_a_masked_secret(project: Project) -> None:
    project.write("breaks.py", "def breaks():\n    raise RuntimeError('api_key=hunter2-0123456789')\n")
    done = project.train("--json", "data=base", "data.train={_target_:breaks.breaks}")
    error = answer(done)["error"]
    assert (done.code, error["code"], error["command"]) == (1, "failed", None)
    assert "hunter2" not in done.text
