from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hydraloop.errors import UserError
from hydraloop.run_files import run_directory


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_two_ids_are_not_the_same() -> None:
    assert len({run_directory.run_id() for _ in range(100)}) == 100


def test_a_new_directory_is_made_under_outputs() -> None:
    first, second = run_directory.new(), run_directory.new()
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


def test_the_links_of_wandb_in_a_job_are_its_own() -> None:
    for folder in (".hydra", "wandb/run-1/logs", "checkpoints/wandb"):
        Path("sweep/0", folder).mkdir(parents=True)
    Path("sweep/0/wandb/run-1/logs/debug-core.log").symlink_to(Path("elsewhere").absolute())
    run_directory.check_links(Path("sweep"), key="sweep.resume")
    Path("sweep/0/checkpoints/wandb/x").symlink_to(Path("elsewhere").absolute())
    with pytest.raises(UserError, match="0/checkpoints/wandb/x is a link"):
        run_directory.check_links(Path("sweep"), key="sweep.resume")


def test_what_is_recorded_without_hydra() -> None:
    run_dir = Path("mine")
    run_directory.record(OmegaConf.create({"seed": 1}), run_dir, resumed=False, folder=run_dir / ".hydra")
    run_directory.record(OmegaConf.create({"seed": 2}), run_dir, resumed=True)
    assert OmegaConf.load(run_dir / ".hydra" / "config.yaml").seed == 1
