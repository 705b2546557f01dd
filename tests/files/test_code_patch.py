"""`code.patch` is complete and masked, and `git apply` accepts it."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import zlib
from pathlib import Path

import pytest

from hydraloop.files import code_patch
from hydraloop.files.secrets import remember
from tests.helpers import make_engine

_ENVIRONMENT = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}
_WHO = ("-c", "user.name=A", "-c", "user.email=a@b")
BINARY = bytes(range(256)) * 40


def git(folder: Path, *arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=folder, check=True, env=_ENVIRONMENT, capture_output=True)
    return done.stdout.decode()


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository with a commit, whose user has chosen another form of diffs."""
    folder = tmp_path / "repository"
    (folder / "package").mkdir(parents=True)
    for name in ("code.py", "package/model.py", "settings.yaml", "weights.bin"):
        (folder / name).write_bytes(b"old = 1\n")
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, *_WHO, "commit", "-q", "-m", "one")
    for name in ("diff.noprefix", "diff.relative"):
        git(folder, "config", name, "true")
    return folder


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    path = tmp_path / "run"
    path.mkdir()
    return path


def test_a_patch_restores_what_was_run(repository: Path, run_dir: Path) -> None:
    """From a folder in the repository; large, binary and non-UTF-8 files, and code about secrets, are whole."""
    changed = {
        "code.py": b"token = load(token=token, password=self.password)\n" + b"x" * 300_000 + b"\n",
        "package/model.py": "name = 'Jos\u00e9'\n".encode("latin-1"),
        "weights.bin": BINARY,
    }
    for name, content in changed.items():
        (repository / name).write_bytes(content)
    found = code_patch.record(run_dir, repository / "package")
    checksum = f"{zlib.crc32((run_dir / 'code.patch').read_bytes()):08x}"
    assert found == {"commit": git(repository, "rev-parse", "HEAD").strip(), "dirty": True, "patch": checksum}
    patch = code_patch.find(run_dir)
    assert patch == run_dir / "code.patch"
    first = patch.read_bytes().splitlines()[0].decode()
    assert first == f"# Changes since commit {found['commit']} in files that git tracks."
    git(repository, "reset", "-q", "--hard")
    git(repository, "apply", str(patch))
    assert {name: (repository / name).read_bytes() for name in changed} == changed


def test_secrets_are_masked_and_the_patch_says_so(repository: Path, run_dir: Path) -> None:
    remember({"api_key": "hunter2hunter2"})
    (repository / "code.py").write_text("client = Client('hunter2hunter2', url='redis://me:hunter3@host')\n")
    (repository / "settings.yaml").write_text("login: hunter2hunter2\n")
    code_patch.record(run_dir, repository)
    text = (run_dir / "code.patch").read_text()
    assert "hunter" not in text
    assert "+client = Client('***', url='redis://me:***@host')\n" in text
    assert "+login: ***\n" in text
    assert text.splitlines()[1] == "# Secrets are masked as ***, so parts with *** do not apply."


def test_committed_code_has_no_patch(repository: Path, run_dir: Path, tmp_path: Path) -> None:
    (repository / "untracked.py").write_text("")
    assert code_patch.record(run_dir, repository)["dirty"] is False
    assert code_patch.find(run_dir) is None
    assert code_patch.record(run_dir, tmp_path) == {}
    assert list(run_dir.iterdir()) == []


def test_a_file_of_the_user_with_its_name_stays(repository: Path, run_dir: Path) -> None:
    """`hydra.run.dir` may be a folder that has files already."""
    (run_dir / "code.patch").write_bytes(BINARY)
    (repository / "code.py").write_text("new = 2\n")
    assert code_patch.record(run_dir, repository)["dirty"] is True
    assert (run_dir / "code.patch").read_bytes() == BINARY


def test_each_attempt_keeps_its_own_patch(repository: Path, run_dir: Path) -> None:
    for number, folder in enumerate((".", ".hydra/resume_9", ".hydra/resume_10")):
        (run_dir / folder).mkdir(parents=True, exist_ok=True)
        (repository / "code.py").write_text(f"number = {number}\n")
        code_patch.record(run_dir, repository)
        assert code_patch.find(run_dir) == run_dir / folder / "code.patch"
        assert f"+number = {number}" in (run_dir / folder / "code.patch").read_text()
    assert "+number = 0" in (run_dir / "code.patch").read_text()


def test_jobs_of_a_sweep_have_the_code_that_it_was_started_with(
    repository: Path, run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "code.py").write_text("new = 2\n")
    monkeypatch.setattr(code_patch, "_read", {})
    commit = git(repository, "rev-parse", "HEAD").strip()
    assert code_patch.prepare(repository) == {"commit": commit, "dirty": True}
    assert code_patch.prepare(tmp_path) == {}
    (repository / "code.py").write_text("new = 3\n")
    monkeypatch.setattr(code_patch, "git_commit", None)  # git is not called again
    assert code_patch.record(run_dir, repository)["commit"] == commit
    assert "+new = 2\n" in (run_dir / "code.patch").read_text()
    assert code_patch.record(run_dir, tmp_path) == {}


def test_a_run_has_the_patch_and_its_result_has_no_code(
    repository: Path, run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (repository / "code.py").write_text("uncommitted = 1\n")
    monkeypatch.chdir(repository)
    make_engine(run_dir).train()
    assert "+uncommitted = 1" in (run_dir / "code.patch").read_text()
    result = (run_dir / "result.json").read_text()
    found = json.loads(result)["git"]
    assert found == {"commit": git(repository, "rev-parse", "HEAD").strip(), "dirty": True, "patch": found["patch"]}
    assert "uncommitted" not in result


def test_a_patch_that_cannot_be_written_is_a_warning(
    repository: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (repository / "code.py").write_text("new = 2\n")
    with caplog.at_level(logging.WARNING):
        assert code_patch.record(tmp_path / "gone", repository)["dirty"] is True
    assert "code.patch cannot be written" in caplog.text
