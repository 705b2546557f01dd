"""Asking git runs no program that a config, or the repository's own config, names. The command of a run."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from hydraloop.files.environment import git_commit, git_diff, script


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with one commit and a change after it."""
    folder = tmp_path / "repository"
    folder.mkdir()
    (folder / "code.py").write_text("old = 1\n")
    (folder / ".gitattributes").write_text("*.py diff=shown\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "-c", "user.name=A", "-c", "user.email=a@b", "commit", "-q", "-m", "one")
    (folder / "code.py").write_text("new = 2\n")
    return folder


@pytest.fixture
def program(tmp_path: Path) -> Path:
    """A program called git that leaves a file `executed`."""
    file = tmp_path / "bin" / "git"
    file.parent.mkdir()
    file.write_text(f"#!/bin/sh\ntouch '{tmp_path}/executed'\n")
    file.chmod(0o755)
    return file


def git(folder: Path, *arguments: str) -> None:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
    subprocess.run(["git", *arguments], cwd=folder, check=True, env=environment)


@pytest.mark.parametrize(
    "environment",
    [
        {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "core.fsmonitor", "GIT_CONFIG_VALUE_0": "PROGRAM"},
        {"GIT_CONFIG_COUNT": "1", "GIT_CONFIG_KEY_0": "diff.shown.textconv", "GIT_CONFIG_VALUE_0": "PROGRAM"},
        {"GIT_EXTERNAL_DIFF": "PROGRAM"},
        {"PATH": "FOLDER"},
        {"GIT_EXEC_PATH": "FOLDER"},
        {"GIT_TRACE": "MARKER"},
    ],
    ids=" ".join,
)
def test_the_environment_of_a_job_does_not_reach_git(
    environment: dict[str, str], repository: Path, program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    marker = tmp_path / "executed"
    meant = {"PROGRAM": program, "FOLDER": program.parent, "MARKER": marker}
    for name, value in environment.items():
        monkeypatch.setenv(name, str(meant.get(value, value)))
    assert len(str(git_commit(repository))) == 40
    assert "+new = 2" in str(git_diff(repository))
    assert not marker.exists()


@pytest.mark.parametrize("key", ["core.fsmonitor", "diff.external", "diff.shown.textconv", "diff.shown.command"])
def test_the_repositorys_own_config_names_no_program(key: str, repository: Path, program: Path, tmp_path: Path) -> None:
    git(repository, "config", key, str(program))
    assert "+new = 2" in str(git_diff(repository))
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize(
    ("spec", "file", "expected"),
    [
        ("pkg.train", "pkg/train.py", ["python", "-m", "pkg.train"]),
        ("pkg.__main__", "pkg/__main__.py", ["python", "-m", "pkg"]),
        ("__main__", "pkg/__main__.py", ["python", "pkg/__main__.py"]),  # `python pkg`
        (None, "train.py", ["python", "train.py"]),
    ],
)
def test_a_module_is_started_as_a_module(
    spec: str | None, file: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    main.__file__, main.__spec__ = file, None if spec is None else ModuleSpec(spec, None)
    monkeypatch.setitem(sys.modules, "__main__", main)
    monkeypatch.delitem(sys.modules, "hydraloop.__main__", raising=False)  # other tests import it
    assert script() == expected
