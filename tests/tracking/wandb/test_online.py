"""WandbTracker online, with a stand-in for the service (`wandb_service.py`)."""

from __future__ import annotations

from pathlib import Path

import pytest

from hydraloop.run.record_cuts import cut_after
from hydraloop.run.record_log import FILENAME
from tests.scripts import load_script
from tests.tracking.runs import attempt, described_run
from tests.tracking.wandb.test_tracker import KEY, drive, everything_below

serving = load_script("benchmarks/wandb_service").serving

UID = "0123456789abcdef"


@pytest.mark.slow
def test_a_run_goes_on_where_the_service_stands(tmp_path: Path) -> None:
    """Killed, resumed, and resumed after a cut that W&B does not take back: each record once, the rest in part 2."""
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
        assert follow("log=3", "drain", "finish").endswith(f"{UID}-2")
        assert service.steps() == {UID: list(range(14)), f"{UID}-2": [8, 9, 10]}
        assert any("Rewind" in asked for asked in service.asked)
    assert KEY not in everything_below(run_dir)


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
