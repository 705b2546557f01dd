"""A signal while hydraloop is imported or starts."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.projects import Project
from tests.marks import slow

SENDS = """
import os, runpy, sys

class Sends:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == {module!r} and not sent:
            sent.append(name)
            try:
                os.kill(os.getpid(), {number})
                for _ in range(100): pass
            except BaseException as error:
                raise ImportError("as some libraries do") from error

sent = []
sys.meta_path.insert(0, Sends)
sys.argv = {argv!r}
sys.path.insert(0, os.getcwd())
"""
TRAINS = "runpy.run_path('train.py', run_name='__main__')"
RUNS = "runpy.run_module('hydraloop', run_name='__main__', alter_sys=True)"


def _ended(code: str, argv: list[str], module: str, number: int, folder: Path) -> tuple[int, str]:
    """Run code in a process that sends itself a signal when it imports a module. Return its exit code and output."""
    program = SENDS.format(module=module, number=int(number), argv=argv) + code
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=folder, timeout=100, check=False
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("module", "number", "code"),
    [
        ("omegaconf", signal.SIGINT, 130),
        ("hydraloop.config.checks", signal.SIGINT, 130),
        slow("torch._C", signal.SIGINT, 130),
        ("torch._C", signal.SIGTERM, 143),
    ],
)
def test_an_interrupted_import_ends_training_with_one_line(module: str, number: int, code: int, tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    name = "Ctrl-C (SIGINT)" if number == signal.SIGINT else "SIGTERM"
    found = _ended(TRAINS, ["train.py", "engine.max_epochs=1"], module, number, project.path)
    assert found == (code, f"interrupted by {name}\n")


@pytest.mark.parametrize("module", ["hydraloop.commands.parser", "hydraloop.commands.runs"])
def test_an_interrupted_import_ends_a_command(module: str, tmp_path: Path) -> None:
    code, output = _ended(RUNS, ["hydraloop", "runs"], module, signal.SIGINT, tmp_path)
    assert code == 130
    assert output in ("", "interrupted by Ctrl-C (SIGINT)\n")


def test_a_script_can_catch_ctrl_c_of_the_import(tmp_path: Path) -> None:
    script = "try:\n    import hydraloop\nexcept KeyboardInterrupt:\n    import hydraloop\n"
    script += "print(hydraloop.Hook.__name__)\n1 / 0"
    code, output = _ended(script, [""], "omegaconf", signal.SIGINT, tmp_path)
    assert code == 1
    assert output.startswith("Hook\nTraceback")
    assert "ZeroDivisionError" in output
