"""The ranks that hydraloop starts: restarts, and how they end."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hydraloop.errors import Terminated, UserError
from hydraloop.plan import RunPlan
from hydraloop.processes import elastic
from hydraloop.processes.failure import Ended, RankError


def plan_in(run_dir: Path, max_restarts: int = 0) -> RunPlan:
    distributed = {"nproc_per_node": 2, "max_restarts": max_restarts}
    return RunPlan(cfg=OmegaConf.create({"distributed": distributed}), run_dir=run_dir)


FAILED = Ended(error=RankError("rank 1: ValueError: x"), trained=False)


def launch(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, attempts: list[Ended], *, max_restarts: int
) -> tuple[Ended, int]:
    """Return how a job ends whose attempts end as given, and the number of attempts that were not made."""
    left = list(attempts)
    monkeypatch.setattr(elastic, "_launch", lambda plan, private: left.pop(0))
    return elastic.launch(plan_in(tmp_path, max_restarts)), len(left)


def test_a_failure_is_restarted_until_an_attempt_succeeds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ended, left = launch(monkeypatch, tmp_path, [FAILED, FAILED, Ended(1.0), FAILED], max_restarts=3)
    assert (ended, left) == (Ended(1.0), 1)
    assert caplog.messages[0] == "restart 1 from the beginning, after: rank 1: ValueError: x"
    assert len(caplog.messages) == 2


def test_the_last_attempt_s_error_is_the_job_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trained = Ended(error=RankError("rank 0 was killed"), trained=True)
    ended, left = launch(monkeypatch, tmp_path, [trained, FAILED, Ended(1.0)], max_restarts=1)
    assert (ended, left) == (Ended(error=FAILED.error, trained=True), 1), "the first attempt has trained"


@pytest.mark.parametrize("error", [UserError("x"), KeyboardInterrupt(), Terminated(15)])
def test_a_mistake_and_a_signal_cause_no_restart(
    error: BaseException, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ended, left = launch(monkeypatch, tmp_path, [Ended(error=error), Ended(1.0)], max_restarts=3)
    assert (ended.error, left) == (error, 1)


def test_a_rank_that_ends_with_exit_code_0_before_it_is_done_has_failed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "result.json").write_text('{"best": {"value": 1.0}}', encoding="utf-8")  # of an earlier attempt
    (tmp_path / "worker.py").write_text("import os\nos._exit(0)\n", encoding="utf-8")
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "")  # torch's launcher sets it
    monkeypatch.setattr(elastic, "__file__", str(tmp_path / "elastic.py"))
    ended = elastic.launch(plan_in(tmp_path))
    assert isinstance(ended.error, RankError)
    assert str(ended.error).startswith("rank 0 ended with exit code 0 and left no error, see ")
    assert str(ended.error).endswith("train.log")
