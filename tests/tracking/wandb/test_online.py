"""WandbTracker with a stand-in for the service: online, and uploaded by `wandb sync`."""

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

from hydraloop.files.metrics_log import FILENAME
from hydraloop.files.metrics_writer import cut_after
from tests.tracking.runs import attempt, described_run
from tests.tracking.wandb.service import Service, serving
from tests.tracking.wandb.test_tracker import KEY, append, drive, everything_below

UID = "0123456789abcdef"


def account(service: Service) -> dict[str, str]:
    return {"WANDB_BASE_URL": service.url, "WANDB_API_KEY": KEY}


def command(run_dir: Path, *arguments: str, service: Service) -> str:
    """What `python -m …` prints."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env={**clean, "HOME": str(run_dir.parent / "home"), **account(service)},
        cwd=run_dir.parent, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def upload(run_dir: Path, service: Service) -> None:
    command(run_dir, "wandb", "sync", *map(str, (run_dir / "wandb").glob("offline-run-*")), service=service)


@pytest.mark.slow
def test_offline_each_step_is_uploaded_once(tmp_path: Path) -> None:
    """The sender was killed, the run was killed and resumed; then it was uploaded, resumed and uploaded again."""
    run_dir = tmp_path / "run"
    described_run(run_dir)
    drive(run_dir, "log=20", "drain", "log=5", "send_and_die", dies=True)
    cut_after(run_dir / FILENAME, iteration=100, last_validation=0)
    described_run(run_dir, attempt(), attempt(1, 100))
    found = drive(run_dir, "log=15", "drain", "finish", "read")
    assert [[row["step"] for row in one["rows"]] for one in found["files"].values()] == [list(range(25))]
    with serving() as service:
        upload(run_dir, service)
        assert service.steps() == {UID: list(range(25))}
        assert [row["iteration"] for row in service.rows[UID].values()] == list(range(10, 251, 10))

        described_run(run_dir, attempt(), attempt(1, 100), attempt(2, 250))
        drive(run_dir, "log=5", "send_and_die", dies=True)
        found = drive(run_dir, "log=5", "drain", "finish")
        assert (found["warnings"], found["sent"]) == ([], 35)
        cut_after(run_dir / FILENAME, iteration=200, last_validation=0)
        described_run(run_dir, attempt(), attempt(1, 100), attempt(2, 250), attempt(3, 200))
        found = drive(run_dir, "log=20", "drain", "finish", "read")
        assert [[row["step"] for row in one["rows"]] for one in found["files"].values()] == [
            list(range(25)), list(range(25, 40)),
        ]  # fmt: skip
        (warning,) = found["warnings"]
        assert warning.startswith("W&B has lines 21 to 25 already")
        upload(run_dir, service)
        assert service.steps() == {UID: list(range(40))}


@pytest.mark.slow
def test_online_a_run_goes_on_where_the_service_stands(tmp_path: Path) -> None:
    """Killed, resumed, and resumed after a cut of records that W&B has."""
    run_dir = tmp_path / "run"
    described_run(run_dir)
    with serving() as service:
        found = drive(run_dir, "log=5", "drain", "kill", "log=5", "drain", "fail", env=account(service), mode=None)
        assert service.steps() == {UID: list(range(10))}
        assert service.exits == {UID: 1}
        assert found["where"] == f"{service.url}/team/p/runs/{UID}"

        cut_after(run_dir / FILENAME, iteration=80, last_validation=0)
        described_run(run_dir, attempt(), attempt(1, 80))
        env = {**account(service), "WANDB_MODE": "offline"}  # the run goes on as it began
        found = drive(run_dir, "log=6", "drain", "finish", env=env, mode=None)
        (warning,) = found["warnings"]
        assert warning.startswith("W&B has lines 9 to 10 already")
        assert (service.steps(), service.exits) == ({UID: list(range(14))}, {UID: 0})
        assert (found["sent"], found["troubles"], found["finished"]) == (14, [], True)
    assert KEY not in everything_below(run_dir)


@pytest.mark.slow
def test_what_did_not_arrive_is_sent_by_the_next_process(tmp_path: Path) -> None:
    """A follower died online, and the service does not have all that it had accepted."""
    run_dir = tmp_path / "run"
    described_run(run_dir)
    with serving() as service:
        drive(run_dir, "log=50", "drain", "kill", "die", dies=True, env=account(service), mode=None)
        assert len(service.steps().get(UID, [])) < 50
        drive(run_dir, "log=5", "drain", "finish", env=account(service), mode=None)
        assert service.steps() == {UID: list(range(55))}


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
    (run_dir / "result.json").write_text(json.dumps({"status": "finished", "best": best}))
    for index, value in enumerate([0.1, 0.9, 0.5]):
        append(run_dir, {"mode": "val", "epoch": 1, "iteration": index, "a": value}, began + 10 * index)
    with serving() as service:
        env = {**account(service), "WANDB_DATA_DIR": str(tmp_path / "data"), "WANDB_CACHE_DIR": str(tmp_path / "cache")}
        drive(run_dir, "drain", "finish", env=env, mode=None, checkpoints="best")
    rows = [(row["val/a"], round(row["_timestamp"] - began)) for row in service.rows[UID].values()]
    assert rows == [(0.1, 0), (0.9, 10), (0.5, 20)]
    assert (service.summaries[UID]["val/a"], service.summaries[UID]["status"]) == (0.9, "finished")
    assert service.artifacts == [
        {"name": f"checkpoint-{UID}", "type": "model", "aliases": ["best", "best_a_iter_1", "latest"]}
    ]
