"""How the ranks that hydraloop has started have ended, by the files that they leave and by their exit codes."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hydraloop.errors import Terminated, UserError
from hydraloop.launch import start_ranks, torchrun
from hydraloop.launch.failure import Failure
from hydraloop.launch.plan import RunPlan


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of two ranks, whose plan rank 0 has made."""
    monkeypatch.setenv(torchrun.NODE, str(tmp_path))
    start_ranks.StartedRun.write()
    start_ranks.StartedRun.write(RunPlan(cfg=OmegaConf.create(), run_dir=tmp_path / "run"))
    for rank in (0, 1):
        (tmp_path / "id" / "attempt_0" / str(rank)).mkdir(parents=True)
    return tmp_path


def error(folder: Path, codes: dict[int, tuple[int, int]]) -> BaseException | None:
    return start_ranks._run_end(folder, start_ranks._failures(folder, 2, codes), 0).error


def test_a_rank_that_was_killed_is_named_by_its_exit_code(folder: Path) -> None:
    assert str(error(folder, {1: (3, -signal.SIGKILL)})) == "rank 3 was killed by SIGKILL (out of memory?)"


def test_only_the_last_start_counts(folder: Path) -> None:
    Failure.of(ValueError("x"), 1).write(folder / "id" / "attempt_0" / "1" / "error.json")
    assert str(error(folder, {1: (1, 1)})) == "rank 1: ValueError: x"
    for rank in (0, 1):
        (folder / "id" / "attempt_10" / str(rank)).mkdir(parents=True)
    Failure.of(UserError("y", key="k"), 0).write(folder / "id" / "attempt_10" / "0" / "error.json")
    found = error(folder, {0: (0, 1), 1: (1, -signal.SIGTERM)})
    assert isinstance(found, UserError)
    assert found.key == "k"


def test_a_signal_that_came_before_the_ranks_could_handle_it(folder: Path) -> None:
    (folder / start_ranks._STOPPED).write_text(str(int(signal.SIGTERM)))
    found = error(folder, {1: (1, 1)})
    assert isinstance(found, Terminated)
    assert found.number == signal.SIGTERM


def test_a_restart_keeps_the_first_start(folder: Path) -> None:
    first = start_ranks.StartedRun.read(folder)
    assert first is not None
    start_ranks.StartedRun.write()
    start_ranks.StartedRun.write(RunPlan(cfg=OmegaConf.create(), run_dir=folder / "run", checkpoint=folder / "a.pth"))
    assert start_ranks.StartedRun.read(folder) == first
