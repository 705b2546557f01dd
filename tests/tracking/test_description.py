"""The description of a run for its trackers: it survives crashes, copies and changes of the clock."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest

from hydraloop.files.result import Result
from hydraloop.tracking import run_description
from hydraloop.tracking.run_description import experiment_name, run_of
from hydraloop.tracking.tracker import Sweep
from tests.helpers import make_engine
from tests.tracking.runs import described_run


def test_a_run_comes_back(tmp_path: Path) -> None:
    run = described_run(tmp_path / "run")
    assert run_description.read(tmp_path / "run") == run
    assert run_description.read(tmp_path) is None


@pytest.mark.parametrize("missing", ["run.json", "attempt_0.json"])
def test_a_process_killed_while_it_describes_leaves_nothing_half(tmp_path: Path, missing: str) -> None:
    described_run(tmp_path)
    folder = tmp_path / "tracking"
    (folder / missing).rename(folder / f".{missing}.7.part")
    assert run_description.read(tmp_path) is None
    described_run(tmp_path)
    assert run_description.read(tmp_path) is not None
    assert sorted(path.name for path in folder.iterdir()) == ["attempt_0.json", "run.json"]


def _ending(run_dir: Path) -> str:
    run = run_description.read(run_dir)
    assert run is not None
    return run_description.ending(run_dir, run.attempt).status


def test_how_an_attempt_ended_whatever_the_clock_says(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    engine = make_engine(run_dir)
    run_dir.mkdir(exist_ok=True)
    run_description.write(run_of(engine, {}))
    assert _ending(run_dir) == "killed"
    Result("stopped", seconds=1.0).write(run_dir)
    os.utime(run_dir / "result.json", (0, 0))
    assert _ending(run_dir) == "stopped"
    shutil.copytree(run_dir, tmp_path / "copy", copy_function=shutil.copyfile)
    assert _ending(tmp_path / "copy") == "stopped"

    run_description.write(run_of(engine, {}))  # resumed
    os.utime(run_dir / "result.json", (2**32, 2**32))
    assert _ending(run_dir) == "killed", "the result is the first attempt's"
    shutil.copytree(run_dir, tmp_path / "second", copy_function=shutil.copyfile)
    assert _ending(tmp_path / "second") == "killed"
    Result("failed", seconds=2.0).write(run_dir)
    assert _ending(run_dir) == "failed"


def test_names_hold_no_secret(tmp_path: Path) -> None:
    records = tmp_path / ".hydra"
    records.mkdir(parents=True)
    engine = make_engine(tmp_path)
    engine.settings.metadata["experiment_name"] = "http://me:s3cretPassw0rd@host"
    assert experiment_name(engine) == "http://me:***@host"
    assert run_of(engine, {}).experiment == "http://me:***@host"


def _hydra(run_dir: Path, mode: str, sweep_dir: str, output_dir: Path, number: str = "3") -> Path:
    (run_dir / ".hydra").mkdir(parents=True)
    (run_dir / ".hydra" / "hydra.yaml").write_text(
        json.dumps(
            {
                "hydra": {
                    "mode": mode,
                    "sweep": {"dir": sweep_dir, "subdir": "${hydra.job.num}"},
                    "runtime": {"cwd": str(output_dir.parents[1]), "output_dir": str(output_dir)},
                    "job": {"num": number},
                }
            }
        )
    )
    return run_dir


def _sweep(folder: Path, uid: str) -> None:
    folder.mkdir(parents=True)
    content = {"uid": uid, "created": 5.0, "jobs": {"swept": ["optimizer.lr"]}}
    (folder / "sweep.json").write_text(json.dumps(content))


@pytest.mark.parametrize("foreign", [None, "{", "[]", "{}", '{"uid": "1", "jobs": []}'])
def test_which_sweep_a_run_is_a_job_of(tmp_path: Path, foreign: str | None) -> None:
    """A `sweep.json` of another program, in a folder between them, does not count."""
    folder = tmp_path / "outputs"
    _sweep(folder, "uid")
    _sweep(folder / "b", "other")
    job = _hydra(folder / "3", "MULTIRUN", "outputs", folder / "3")
    alone = _hydra(folder / "day" / "run", "RUN", "???", folder / "day" / "run", "???")
    deeper = _hydra(folder / "lr=1" / "seed=2", "MULTIRUN", str(folder), folder / "lr=1" / "seed=2")
    other = _hydra(folder / "b" / "0", "MULTIRUN", f"{folder}/b", folder / "b" / "0", "5")
    python = folder / "7"
    if foreign is not None:
        (folder / "lr=1" / "sweep.json").write_text(foreign)
    found = [run_description.sweep_of(run_dir) for run_dir in (job, alone, deeper, other, python, tmp_path / "run")]
    assert [sweep and (sweep.uid, sweep.job) for sweep in found] == [
        ("uid", 3),
        None,
        ("uid", 3),
        ("other", 5),
        ("uid", 7),
        None,
    ]
    assert found[0] == Sweep(folder, "uid", "outputs", 3, ("optimizer.lr",), 5.0)


def test_a_job_knows_its_sweep_where_that_was_moved(tmp_path: Path) -> None:
    _sweep(tmp_path / "sweep", "uid")
    run_dir = tmp_path / "sweep" / "3"
    run_dir.mkdir()
    run_description.write(run_of(make_engine(run_dir), {}))
    (tmp_path / "sweep").rename(tmp_path / "moved")
    run = run_description.read(tmp_path / "moved" / "3")
    assert run is not None
    assert run.sweep == Sweep(tmp_path / "moved", "uid", "sweep", 3, ("optimizer.lr",), 5.0)


@pytest.mark.parametrize(
    ("keys", "short"),
    [
        (["optimizer.lr", "optimizer.weight_decay"], ["lr", "weight_decay"]),
        (["optimizer.lr", "scheduler.lr", "hooks"], ["optimizer.lr", "scheduler.lr", "hooks"]),
        (["lr", "optimizer.lr", "a.optimizer.lr"], ["lr", "optimizer.lr", "a.optimizer.lr"]),
    ],
)
def test_keys_are_shortened_as_long_as_they_differ(keys: list[str], short: list[str]) -> None:
    assert list(run_description.short_keys(keys).values()) == short
