"""scripts/setup.sh: which interpreter .venv has, and when it is created again."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.projects import REPOSITORY

BASE = os.path.realpath(sys.executable)
BACKEND = """
import zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    with zipfile.ZipFile(folder + "/tiny-1-py3-none-any.whl", "w") as wheel:
        metadata = "Metadata-Version: 2.1\\nName: tiny\\nVersion: 1\\nProvides-Extra: dev\\n"
        wheel.writestr("tiny-1.dist-info/METADATA", metadata)
        wheel.writestr("tiny-1.dist-info/WHEEL", "Wheel-Version: 1.0\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n")
        wheel.writestr("tiny-1.dist-info/RECORD", "")
    return "tiny-1-py3-none-any.whl"
"""
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project without dependencies, so that pip needs no network; its .venv has another Python and is up to date."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(REPOSITORY / "scripts" / "setup.sh", tmp_path / "scripts")
    (tmp_path / "backend.py").write_text(BACKEND)
    (tmp_path / "pyproject.toml").write_text(PYPROJECT)
    (tmp_path / "constraints.txt").touch()
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\n[ "$1" = -c ] && echo another Python\n')
    python.chmod(0o755)
    (tmp_path / ".venv" / "pyvenv.cfg").touch()
    stamp = f'echo "$(cat "{tmp_path}/pyproject.toml" "{tmp_path}/constraints.txt" | cksum) {tmp_path}"'
    (tmp_path / ".venv" / ".hydraloop-installed").write_bytes(subprocess.check_output(["bash", "-c", stamp]))
    return tmp_path


def setup(root: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    left_out = ("PYTHON", "HYDRALOOP_VENV", "HYDRALOOP_CONSTRAINTS")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    command = ["bash", "-c", 'source "$0/scripts/setup.sh"', str(root)]
    return subprocess.run(command, env=kept | environment, capture_output=True, text=True, timeout=300, check=False)


def test_without_python_the_environment_stays(root: Path) -> None:
    before = sorted(root.rglob("*"))
    done = setup(root)
    assert (done.returncode, done.stderr) == (0, "")
    assert sorted(root.rglob("*")) == before


@pytest.mark.slow
def test_python_chooses_the_interpreter(root: Path) -> None:
    done = setup(root, PYTHON=BASE)
    assert done.returncode == 0, done.stderr
    assert "installing into" in done.stderr
    code = "import sys; print(sys.version, sys.base_prefix)"
    found = [subprocess.check_output([python, "-c", code]) for python in (str(root / ".venv/bin/python"), BASE)]
    assert found[0] == found[1]
    again = setup(root, PYTHON=BASE)
    assert (again.returncode, again.stderr) == (0, "")


def test_a_python_that_does_not_exist(root: Path) -> None:
    done = setup(root, PYTHON="/no/such/python")
    assert done.returncode == 2
    assert "error: hydraloop needs Python 3.11 or later" in done.stderr
