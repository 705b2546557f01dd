"""A command in the folder of an unpacked archive runs no Python file of the archive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

NAMES = (
    *("__future__", "dataclasses", "difflib", "enum", "hydra", "inspect", "json", "omegaconf", "pathlib", "re"),
    *("shlex", "signal", "threading", "typing", "yaml", "antlr4"),
)


@pytest.mark.parametrize("flags", [("-m", "hydraloop"), ("-X", "utf8", "-mhydraloop")], ids=" ".join)
def test_no_module_beside_a_run_is_imported(flags: tuple[str, ...], tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / f"{name}.py").write_text(f"open('RAN', 'a').write('{name} ')\n")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "result.json").write_text('{"status": "finished"}')
    command = [sys.executable, *flags, "status", "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stdout.startswith("finished")
    assert not (tmp_path / "RAN").exists()
