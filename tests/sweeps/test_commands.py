"""`python -m hydraloop status|logs` on directories as sweeps and runs leave them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hydraloop.sweeps.commands import main


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A detached run that has finished."""
    run_dir = tmp_path / "run"
    (run_dir / ".hydra").mkdir(parents=True)
    (run_dir / "result.json").write_text(json.dumps({"status": "finished", "val_metrics": {"loss": 0.5}}))
    (run_dir / "output.log").write_text("epoch 1\n")
    return run_dir


def test_logs_prints_what_the_run_has_printed(run: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert main(["logs", "-f", str(run)]) == 0
    assert capfdbinary.readouterr().out == b"epoch 1\n"


def test_bad_input_is_one_message(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", str(run.parent)]) == 2
    assert capsys.readouterr().err.startswith(f"error: directory: {run.parent} holds no sweep and no run\n  ")
    (run / "output.log").unlink()
    assert main(["logs", str(run)]) == 2
    assert capsys.readouterr().err.count("error: ") == 1
