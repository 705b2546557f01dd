"""`hydraloop new`: what it writes trains, and it never changes a file that exists."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from hydraloop.commands.command_line import view as run
from hydraloop.commands.new import TEMPLATES, templates
from hydraloop.commands.parser import help_of
from hydraloop.config.compose import opened
from tests.e2e.projects import REPOSITORY, Project

LEFT_OUT = {"__pycache__", "outputs", "multirun"}


def contents(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): path.read_text(encoding="utf-8")
        for path in folder.rglob("*")
        if path.is_file() and not LEFT_OUT.intersection(path.relative_to(folder).parts)
    }


def test_a_project_has_its_own_name_and_a_config_of_nine_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["new", "demo"]) == 0
    found = contents(tmp_path / "demo")
    assert {"train.py", "conf/config.yaml", "model.py", "data.py", "hooks.py", "test_project.py", "README.md"} < set(
        found
    )
    assert len(found["conf/config.yaml"].splitlines()) <= 9
    assert "\nexperiment_name: demo\n" in found["conf/config.yaml"]
    assert capsys.readouterr().out.endswith("Next:\n  cd demo\n  python train.py\n")


def test_the_name_of_a_folder_is_not_read_as_a_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "null").mkdir()
    monkeypatch.chdir(tmp_path / "null")
    assert run(["new", "."]) == 0
    assert "\nexperiment_name: starter\n" in contents(tmp_path / "null")["conf/config.yaml"]
    assert run(["new", "."]) == 2


@pytest.mark.parametrize("name", templates())
def test_each_example_is_a_template(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["new", "a b", "--from", name]) == 0, "a name that needs quotes in YAML is not used"
    assert contents(tmp_path / "a b") == contents(REPOSITORY / "examples" / name)
    conf = tmp_path / "a b" / "conf"
    (conf / "experiment").mkdir(exist_ok=True)
    (conf / "experiment" / "mine.yaml").write_text("# @package _global_\nseed: 7\n")
    with opened(conf, "config") as composer:
        assert composer.compose(["experiment=mine"]).seed == 7


def test_the_examples_are_those_of_the_repository() -> None:
    assert TEMPLATES.resolve() == REPOSITORY / "examples"
    assert templates()[0] == "starter"


def test_a_folder_with_files_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "notes").touch()
    assert run(["new", "demo"]) == 2
    assert capsys.readouterr().err == ("error: new: demo exists, and is not an empty folder\n  Name another folder.\n")
    assert list(contents(tmp_path)) == ["demo/notes"]


def test_the_examples_are_listed_by_the_help_and_a_wrong_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert all(name in help_of("new") for name in templates())
    assert run(["new", "demo", "--from", "stater"]) == 2
    assert capsys.readouterr().err == "error: --from: there is no example 'stater'\n  Did you mean starter?\n"
    assert contents(tmp_path) == {}


@pytest.mark.nightly  # tests/test_wheel.py has a shorter sweep of such a project
def test_a_project_trains_is_swept_and_its_tests_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["new", "demo"]) == 0
    project = Project(tmp_path / "demo")
    done = project.train("-m", "optimizer.lr=1e-3,1e-2")
    assert re.search(r"best: job 1, accuracy (0\.9|1\.0)", done.out), done.text
    tested = subprocess.run(
        [sys.executable, "-m", "pytest"], cwd=project.path, capture_output=True, text=True, check=False
    )
    assert "2 passed" in tested.stdout, tested.stdout
