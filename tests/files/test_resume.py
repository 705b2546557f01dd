from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig, OmegaConf

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.errors import UserError
from hydraloop.files import run_directory
from hydraloop.files.checkpoint_files import point_to
from hydraloop.files.checkpoint_to_resume import find, newest_checkpoint
from hydraloop.launch.plan import plan_build


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def config(**changed: object) -> DictConfig:
    cfg = OmegaConf.create(
        {
            "experiment_name": "digits",
            "resume": "auto",
            "seed": 0,
            "task": {"model": {"_target_": "m.Net", "width": 4}},
            "data": {"train": {"_target_": "d.Digits"}, "val": None, "loader": {"batch_size": 64}},
        }
    )
    for key, value in changed.items():
        OmegaConf.update(cfg, key.replace("__", "."), value)
    return cfg


def make_run(name: str, *checkpoints: str, cfg: DictConfig | None = None, out_dir: Path | None = None) -> Path:
    """Make a run directory with complete checkpoints, the first one the oldest."""
    run_dir = Path("outputs") / name
    run_directory.record_config(cfg or config(), run_dir / ".hydra")
    if out_dir is not None:
        run_directory.record_checkpoint_folder(run_dir, out_dir)
    folder = out_dir or run_dir / "checkpoints"
    folder.mkdir()
    for age, checkpoint in enumerate(checkpoints):
        torch.save({"format": 1}, folder / checkpoint)
        os.utime(folder / checkpoint, (1000 + age, 1000 + age))
    return run_dir


def test_auto_takes_the_newest_run_and_in_it_the_newest_complete_checkpoint() -> None:
    make_run("2026-01-01/10-00-00-ffffff", "epoch_1.pth")
    make_run("2026-01-02/09-00-00-aaaaaa", "epoch_1.pth")
    newest = make_run("2026-01-02/10-00-00-000000", "epoch_9.pth", "epoch_10.pth")
    make_run("2026-01-03/10-00-00-aaaaaa")  # no checkpoint yet
    (newest / "checkpoints" / "epoch_11.pth").write_bytes(b"cut off")
    found = find(config(), None)
    assert found == (newest, newest / "checkpoints" / "epoch_10.pth")


def started(run_dir: Path, seconds: int) -> Path:
    """Let a run have started at a time."""
    for records in (run_dir / ".hydra", *run_directory.attempts(run_dir)[-1:]):
        os.utime(records / "config.yaml", (seconds, seconds))
    return run_dir


NAMES = ("2026-01-01/10-00-00-aaaaaa", "first", "first/inside")


@pytest.mark.parametrize("newest", NAMES)
def test_auto_takes_the_run_that_was_started_last_whatever_its_name_and_depth(newest: str) -> None:
    runs = [started(make_run(name, "epoch_1.pth"), 1000) for name in NAMES]
    wanted = started(runs[NAMES.index(newest)], 2000)
    assert find(config(), None) == (wanted, wanted / "checkpoints" / "epoch_1.pth")


def test_auto_takes_the_run_that_was_resumed_last() -> None:
    older = started(make_run("first", "epoch_1.pth"), 1000)
    started(make_run("second", "epoch_1.pth"), 2000)
    attempt(older)
    os.utime(run_directory.attempts(older)[-1] / "config.yaml", (3000, 3000))
    assert find(config(), None)[0] == older


def test_auto_takes_no_job_of_a_sweep() -> None:
    job = make_run("sweep/0", "epoch_1.pth")
    (job.parent / "sweep.json").write_text("{}")
    with pytest.raises(UserError):
        find(config(), None)


@pytest.mark.parametrize(
    "changed",
    [
        {"experiment_name": "other"},
        {"task__model__width": 8},
        {"task__model__depth": 2},
        {"data__train__root": "/elsewhere"},
        {"data__val": {"_target_": "d.Digits"}},
    ],
)
def test_a_run_of_another_experiment_model_or_data_is_not_taken(changed: dict[str, object]) -> None:
    mine = make_run("2026-01-01/10-00-00-aaaaaa", "epoch_1.pth")
    make_run("2026-01-02/10-00-00-aaaaaa", "epoch_1.pth", cfg=config(**changed))
    assert find(config(), None)[0] == mine


def test_what_only_a_job_can_resolve_counts_as_it_is_written() -> None:
    cfg = config(data__train__root="${hydra:runtime.cwd}/data")
    mine = make_run("2026-01-01/10-00-00-aaaaaa", "epoch_1.pth", cfg=cfg)
    assert find(cfg, None)[0] == mine


def test_a_config_that_cannot_be_read_is_no_run_of_ours() -> None:
    mine = make_run("2026-01-01/10-00-00-aaaaaa", "epoch_1.pth")
    (make_run("2026-01-02/10-00-00-aaaaaa", "epoch_1.pth") / ".hydra" / "config.yaml").write_text("a: [1")
    assert find(config(), None)[0] == mine


def test_auto_with_nothing_to_resume_is_an_error() -> None:
    make_run("2026-01-01/10-00-00-aaaaaa")
    with pytest.raises(UserError) as caught:
        find(config(), None)
    assert caught.value.key == "resume"
    assert "resume=outputs/" in str(caught.value.remedy)


def test_auto_looks_in_a_named_directory_and_nowhere_else() -> None:
    make_run("2026-01-01/10-00-00-aaaaaa", "epoch_1.pth")
    assert find(config(), Path("new")) == (None, None)
    named = make_run("mine/run", "epoch_1.pth", "epoch_2.pth", cfg=config(experiment_name="other"))
    found = find(config(), named)
    assert found == (named, named / "checkpoints" / "epoch_2.pth")


def test_a_run_directory_and_a_checkpoint_file() -> None:
    run_dir = make_run("2026-01-01/10-00-00-aaaaaa", "epoch_1.pth", "epoch_2.pth")
    first, second = (run_dir / "checkpoints" / f"epoch_{epoch}.pth" for epoch in (1, 2))
    assert find(config(resume=str(run_dir)), None) == (run_dir, second)
    found = find(config(resume=str(first)), None)
    assert found[0] is not None
    assert (found[0].resolve(), found[1]) == (run_dir.resolve(), first)


def test_a_checkpoint_outside_of_any_run_starts_a_new_directory() -> None:
    torch.save({}, "alone.pth")
    assert find(config(resume="alone.pth"), None) == (None, Path("alone.pth"))


def attempt(run_dir: Path, **changed: object) -> None:
    """The records of an attempt to resume, as Hydra writes them."""
    folder = run_directory.next_attempt(run_dir)
    folder.mkdir()
    OmegaConf.save(config(**changed), folder / "config.yaml")


def test_an_attempt_with_another_model_changes_nothing_about_which_run_it_is() -> None:
    run_dir = make_run("2026-01-01/10-00-00-aaaaaa", "epoch_1.pth")
    attempt(run_dir, task__model__width=32)
    assert find(config(), None)[0] == run_dir
    with pytest.raises(UserError, match="same experiment, model and data"):
        find(config(task__model__width=32), None)


@pytest.mark.parametrize("resume", ["outputs/none", "none.pth"])
def test_what_is_not_there(resume: str) -> None:
    with pytest.raises(UserError, match="neither a run directory nor a checkpoint file") as caught:
        find(config(resume=resume), None)
    assert caught.value.key == "resume"


@pytest.mark.parametrize("damaged", [["epoch_1.pth"], ["epoch_1.pth", "epoch_2.pth"]])
def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_again(damaged: list[str]) -> None:
    make_run("2026-01-01/10-00-00-aaaaaa", "epoch_9.pth")
    run_dir = make_run("2026-01-02/10-00-00-aaaaaa", *damaged)
    for name in damaged:
        (run_dir / "checkpoints" / name).write_bytes(b"cut off")
    for wanted, explicit in (("auto", None), ("auto", run_dir), (str(run_dir), None)):
        with pytest.raises(UserError, match=r"no checkpoint of .* is intact") as caught:
            find(config(resume=wanted), explicit)
        assert caught.value.key == "resume"
    with pytest.raises(UserError, match=r"no checkpoint of .* is intact"):
        newest_checkpoint(run_dir)  # a restart


def test_a_run_whose_only_checkpoint_is_gone_does_not_start_again() -> None:
    run_dir = make_run("2026-01-02/10-00-00-aaaaaa", "epoch_1.pth")
    checkpoint = run_dir / "checkpoints" / "epoch_1.pth"
    point_to(checkpoint)
    checkpoint.unlink()  # by a clean-up of old files
    for wanted, explicit in (("auto", None), ("auto", run_dir), (str(run_dir), None)):
        with pytest.raises(UserError, match=r"epoch_1.pth neither") as caught:
            find(config(resume=wanted), explicit)
        assert f"move {run_dir / 'checkpoints'} away" in str(caught.value.remedy)


def test_two_directories_are_refused() -> None:
    run_dir = make_run("2026-01-01/10-00-00-aaaaaa", "epoch_1.pth")
    with pytest.raises(UserError, match="continues in its own directory") as caught:
        find(config(resume=str(run_dir)), Path("other"))
    assert caught.value.key == "hydra.run.dir"
    assert "load_from=" in str(caught.value.remedy)
    assert find(config(resume=str(run_dir)), run_dir.absolute())[0] == run_dir


def planned(cfg: DictConfig, run_dir: Path | None) -> tuple[Path, Path | None]:
    """Return where a run that is started from Python begins or continues."""
    plan, _ = plan_build(cfg, run_dir, (), Distributed())
    return plan.run_dir, plan.checkpoint


def test_a_run_from_python() -> None:
    assert planned(config(resume=None), Path("x")) == (Path("x"), None)
    new, _ = planned(config(resume=None), None)
    assert new.is_dir()
    run_dir = make_run("2026-01-01/10-00-00-aaaaaa", "epoch_1.pth")
    assert planned(config(), None)[0] == run_dir
    assert planned(config(), run_dir)[1] == run_dir / "checkpoints" / "epoch_1.pth"
    assert planned(config(), Path("empty")) == (Path("empty"), None)
    first, _ = plan_build(config(resume=None), Path("x"), (), Distributed())
    again, _ = plan_build(config(), run_dir, (), Distributed())
    assert [(plan.is_recorded, plan.attempt) for plan in (first, again)] == [
        (False, None),
        (False, run_dir / ".hydra" / "resume_1"),
    ]


@pytest.mark.parametrize("resume", [None, "alone.pth"])
def test_a_new_run_from_python_overwrites_no_other(resume: str | None) -> None:
    torch.save({}, "alone.pth")
    run_dir = make_run("2026-01-01/10-00-00-aaaaaa", "epoch_1.pth")
    with pytest.raises(UserError, match="holds a run already") as caught:
        planned(config(resume=resume), run_dir)
    assert caught.value.key == "run_dir"
    assert f"resume={run_dir}" in str(caught.value.remedy)


def test_a_resume_opens_no_file_that_hooks_have_written() -> None:
    """There may be thousands, on a file server."""
    run_dir = make_run("long", "epoch_1.pth")
    (run_dir / "media").mkdir()
    (run_dir / "media" / "picture.png").touch()
    opened: list[str] | None = []
    sys.addaudithook(
        lambda event, args: opened.append(str(args[0])) if event == "open" and opened is not None else None
    )
    plan, _ = plan_build(config(resume=str(run_dir)), None, (), Distributed())
    seen, opened = opened, None
    assert plan.run_dir == run_dir
    assert any(path.endswith("epoch_1.pth") for path in seen)
    assert not [path for path in seen if path.endswith("picture.png")]
