"""WandbTracker online, with a stand-in for the service (`wandb_service.py`)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from hydraloop.run_files.record_cuts import cut_after
from hydraloop.run_files.record_log import FILENAME
from hydraloop.tracking.tracker import WANDB
from tests.tracking.runs import attempt, described_run, log_records, track
from tests.tracking.wandb.driver import OPTIONS
from tests.tracking.wandb.service import serving
from tests.tracking.wandb.test_tracker import KEY, ROOT, append, drive, everything_below

UID = "0123456789abcdef"


@pytest.mark.slow
def test_a_run_goes_on_where_the_service_stands(tmp_path: Path) -> None:
    """Killed, resumed, and resumed after a cut that W&B does not take back, which is reported once."""
    run_dir = tmp_path / "run"
    described_run(run_dir)
    with serving() as service:
        env = {"WANDB_BASE_URL": service.url, "WANDB_API_KEY": KEY}

        def follow(*actions: str) -> str:
            found = drive(run_dir, *actions, env=env, mode="auto", flush_timeout=30.0)
            assert found["finished"]
            return str(found["where"])

        where = follow("log=5", "drain", "kill", "log=5", "drain", "fail")
        assert service.steps() == {UID: list(range(10))}
        assert service.exits == {UID: 1}
        assert where == f"{service.url}/team/p/runs/{UID}"

        described_run(run_dir, attempt(), attempt(1, 100))
        follow("log=4", "drain", "finish")
        assert service.steps() == {UID: list(range(14))}

        cut_after(run_dir / FILENAME, iteration=80, last_validation=0)
        described_run(run_dir, attempt(), attempt(1, 100), attempt(2, 80))
        found = drive(run_dir, "log=3", "step", env=env, mode="auto", flush_timeout=30.0)
        assert found["states"] == ["given up"]
        assert "does not take back" in found["troubles"][0]
        assert service.steps() == {UID: list(range(14))}
        assert any("Rewind" in asked for asked in service.asked)
    assert KEY not in everything_below(run_dir)


@pytest.mark.slow
def test_rows_that_a_resume_replaces_are_taken_back(tmp_path: Path) -> None:
    """If the service can rewind: each step is there once, with the value of the resumed run."""
    run_dir = tmp_path / "run"
    described_run(run_dir)
    with serving() as service:
        service.rewinds = True
        env = {"WANDB_BASE_URL": service.url, "WANDB_API_KEY": KEY}
        drive(run_dir, "log=14", "drain", "fail", env=env, mode="auto", flush_timeout=30.0)
        cut_after(run_dir / FILENAME, iteration=80, last_validation=0)
        described_run(run_dir, attempt(), attempt(1, 80, **{"optimizer.lr": 0.2}))
        for index in range(8, 11):
            append(run_dir, {"mode": "train", "epoch": 1, "iteration": 10 * (index + 1), "loss": 7.0}, time.time())
        found = drive(run_dir, "drain", "finish", env=env, mode="auto", flush_timeout=30.0)
        assert (found["troubles"], found["sent"], found["finished"]) == ([], 11, True)
        assert service.steps() == {UID: list(range(11))}
        assert [row["train/loss"] for row in service.rows[UID].values()][7:] == [1 / 80, 7.0, 7.0, 7.0]
        assert service.exits == {UID: 0}

        drive(run_dir, "log=2", "drain", "finish", env=env, mode="auto", flush_timeout=30.0)
        assert service.steps() == {UID: list(range(13))}


def sync(run_dir: Path, *arguments: str, env: dict[str, str]) -> str:
    """What `python -m hydraloop sync` prints."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-m", "hydraloop", "sync", *arguments, str(run_dir)],
        env={**clean, "HOME": str(run_dir.parent / "home"), **env},
        cwd=ROOT, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_sync_of_a_run_that_was_never_opened_opens_the_one_that_training_continues(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    described_run(run_dir)
    log_records(run_dir, 10)
    track(run_dir, "wandb", WANDB, {**OPTIONS, "mode": "online"})
    with serving() as service:
        sync(run_dir, env={"WANDB_BASE_URL": service.url, "WANDB_API_KEY": KEY})
        assert service.steps() == {UID: list(range(10))}


@pytest.mark.nightly
def test_everything_is_sent_again_to_a_new_run(tmp_path: Path) -> None:
    """`sync --again`, online and from offline to online: one new run each time, which `sync` then leaves as it is."""
    run_dir = tmp_path / "run"
    described_run(run_dir)
    (run_dir / "result.json").write_text(json.dumps({"status": "finished"}))
    offline = drive(run_dir, "log=10", "drain", "finish", "read")
    with serving() as service:
        env = {"WANDB_BASE_URL": service.url, "WANDB_API_KEY": KEY}
        said = sync(run_dir, "--again", "hooks.wandb.mode=online", env=env)
        (first,) = service.steps()
        assert said.endswith(f"10 sent, 10 of 10 records there, {service.url}/team/p/runs/{first}\n")
        assert (service.rows[first][9]["train/loss"], service.exits[first]) == (1 / 100, 0)

        sync(run_dir, "--again", env=env)
        (second,) = service.steps().keys() - {first}
        sync(run_dir, env=env)
        assert service.steps() == {first: list(range(10)), second: list(range(10))}
        assert UID not in (first, second)
    assert drive(run_dir, "read")["files"] == offline["files"]


@pytest.mark.slow
def test_what_the_page_shows(tmp_path: Path) -> None:
    """Times of the records, the best value, and the best checkpoint by its alias."""
    run_dir = tmp_path / "run"
    began = time.time() - 86_400
    described_run(run_dir, replace(attempt(), began=began))
    checkpoint = run_dir / "checkpoints" / "best_a_iter_1.pth"
    checkpoint.parent.mkdir()
    with zipfile.ZipFile(checkpoint, "w") as file:
        file.writestr("data", "weights")
    best = {"metric": "a", "value": 0.9, "iteration": 1, "checkpoint": str(checkpoint)}
    objective = {"metric": "a", "rule": "greater", "value": 0.9, "iteration": 1}
    (run_dir / "result.json").write_text(json.dumps({"status": "finished", "best": best, "objective": objective}))
    for index, value in enumerate([0.1, 0.9, 0.5]):
        append(run_dir, {"mode": "val", "epoch": 1, "iteration": index, "a": value}, began + 10 * index)
    with serving() as service:
        env = {"WANDB_BASE_URL": service.url, "WANDB_API_KEY": KEY}
        env |= {"WANDB_DATA_DIR": str(tmp_path / "data"), "WANDB_CACHE_DIR": str(tmp_path / "cache")}
        drive(run_dir, "drain", "finish", env=env, mode="auto", flush_timeout=30.0, checkpoints="best")
    assert [(row["val/a"], row["_runtime"]) for row in service.rows[UID].values()] == [(0.1, 0), (0.9, 10), (0.5, 20)]
    assert (service.summaries[UID]["val/a"], service.summaries[UID]["status"]) == (0.9, "finished")
    assert sorted(service.artifacts, key=lambda one: one["type"]) == [  # only those of one name come in order
        {"name": f"checkpoint-{UID}", "type": "model", "aliases": ["best", "best_a_iter_1", "latest"]},
    ]


@pytest.mark.slow
def test_what_did_not_arrive_is_sent_by_the_next_process(tmp_path: Path) -> None:
    """A follower died online, and the service does not have all that it had accepted."""
    run_dir = tmp_path / "run"
    described_run(run_dir)
    with serving() as service:
        env = {"WANDB_BASE_URL": service.url, "WANDB_API_KEY": KEY}
        drive(run_dir, "log=50", "drain", "kill", "die", dies=True, env=env, mode="auto", flush_timeout=30.0)
        assert len(service.steps().get(UID, [])) < 50
        drive(run_dir, "log=5", "drain", "finish", env=env, mode="auto", flush_timeout=30.0)
        assert service.steps() == {UID: list(range(55))}
