"""WandbTracker online, with a stand-in for the service (`wandb_service.py`)."""

from __future__ import annotations

import json
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from hydraloop.run.record_cuts import cut_after
from hydraloop.run.record_log import FILENAME
from tests.scripts import load_script
from tests.tracking.runs import attempt, described_run
from tests.tracking.wandb.test_tracker import KEY, append, drive, everything_below

serving = load_script("benchmarks/wandb_service").serving

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
def test_what_the_page_shows(tmp_path: Path) -> None:
    """Times of the records, the best value, data sets as inputs, and the best checkpoint by its alias."""
    run_dir = tmp_path / "run"
    data = {"train": {"_target_": "hydraloop.data.Digits", "split": "train"}}
    began = time.time() - 86_400
    described_run(run_dir, replace(attempt(), config=json.dumps({"data": data}), began=began))
    checkpoint = run_dir / "checkpoints" / "best_a_iter_1.pth"
    checkpoint.parent.mkdir()
    with zipfile.ZipFile(checkpoint, "w") as file:
        file.writestr("data", "weights")
    best = {"metric": "a", "value": 0.9, "iteration": 1, "checkpoint": str(checkpoint)}
    monitor = {"metric": "a", "rule": "greater"}
    (run_dir / "result.json").write_text(json.dumps({"status": "finished", "best": best, "monitor": monitor}))
    for index, value in enumerate([0.1, 0.9, 0.5]):
        append(run_dir, {"mode": "val", "epoch": 1, "iteration": index, "a": value}, began + 10 * index)
    with serving() as service:
        env = {"WANDB_BASE_URL": service.url, "WANDB_API_KEY": KEY}
        env |= {"WANDB_DATA_DIR": str(tmp_path / "data"), "WANDB_CACHE_DIR": str(tmp_path / "cache")}
        drive(run_dir, "drain", "finish", env=env, mode="auto", flush_timeout=30.0, checkpoints="best")
    assert [(row["val/a"], row["_runtime"]) for row in service.rows[UID].values()] == [(0.1, 0), (0.9, 10), (0.5, 20)]
    assert (service.summaries[UID]["val/a"], service.summaries[UID]["status"]) == (0.9, "finished")
    assert service.artifacts == [
        {"name": "Digits-train", "type": "dataset", "aliases": ["latest"], "used_by": UID},
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
