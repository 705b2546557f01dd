from __future__ import annotations

import os
from pathlib import Path

import pytest

from hydraloop.errors import UserError
from hydraloop.files import run_directory


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_a_new_directory_is_made_under_outputs() -> None:
    first, second = run_directory.new_run_dir(), run_directory.new_run_dir()
    assert first != second
    assert first.is_dir()
    assert first.parts[0] == "outputs"
    assert not run_directory.holds_run(first)


@pytest.mark.parametrize("what", [".hydra/config.yaml", "result.json", "checkpoints/epoch_1.pth"])
def test_what_makes_a_directory_a_runs(what: str) -> None:
    assert not run_directory.holds_run(Path("some"))
    path = Path("some") / what
    path.parent.mkdir(parents=True)
    path.touch()
    assert run_directory.holds_run(Path("some"))


def test_links_out_of_a_run_are_refused_but_not_those_to_logs_of_wandb() -> None:
    Path("run/wandb/offline-run/logs").mkdir(parents=True)
    Path("run/wandb/offline-run/logs/debug-core.log").symlink_to(Path("cache.log").absolute())
    Path("run/wandb/latest-run").symlink_to("offline-run")
    run_directory.check_links(Path("run"), key="resume")
    Path("run/checkpoints").mkdir()
    Path("run/checkpoints/wandb").mkdir()
    for link in ("run/checkpoints/wandb/x", "run/tensorboard"):
        Path(link).symlink_to(Path("elsewhere").absolute())
        with pytest.raises(UserError, match=f"^resume: {link} is a link to .*/elsewhere, outside of run"):
            run_directory.check_links(Path("run"), key="resume")
        Path(link).unlink()


def test_a_pipe_in_a_run_that_is_resumed_is_refused() -> None:
    Path("run").mkdir()
    os.mkfifo("run/train.log")
    with pytest.raises(UserError, match=r"^resume: run/train.log is not a regular file"):
        run_directory.check_links(Path("run"), key="resume")
