"""`result.json`: how a run ended, for scripts."""

from __future__ import annotations

import json
import math
import time
from contextlib import nullcontext
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest
import torch

from hydraloop.engine.hook import Hook
from hydraloop.errors import Terminated, UserError
from hydraloop.files.result import Best, Objective, Result, ResultFile, Status, describe, digest
from hydraloop.hooks.checkpoint import CheckpointHook
from hydraloop.hooks.runtime_info import RuntimeInfoHook
from hydraloop.sweeps.job_states import JobState, ended_from_result
from hydraloop.tasks.task import Task
from tests.helpers import at, batches, failing, make_engine
from tests.hooks.tiny_runs import Scripted


def _read(run_dir: Path) -> dict[str, Any]:
    def refuse(constant: str) -> float:
        raise AssertionError(f"{constant} is not JSON")

    loaded: dict[str, Any] = json.loads((run_dir / "result.json").read_text(), parse_constant=refuse)
    return loaded


def test_a_finished_run(tmp_path: Path) -> None:
    hooks: dict[str, Hook] = {"checkpoint": CheckpointHook(save_best="loss")}
    engine = make_engine(tmp_path, hooks, val=batches(1), test=batches(1), max_epochs=2)
    returned = engine.train()
    result = _read(tmp_path)
    assert set(result) == {
        "status", "error", "reason", "val_metrics", "test_metrics", "best", "objective", "progress", "seconds",
        "earlier_seconds", "hook_seconds", "versions", "git", "records",
    }  # fmt: skip
    assert (result["status"], result["error"], result["reason"]) == ("finished", None, None)
    assert result["val_metrics"] == engine.metrics
    assert result["test_metrics"] == engine.evaluator.test_metrics
    assert set(engine.metrics) == {"loss"}
    best = result["best"]
    assert (best["metric"], best["value"], best["iteration"]) == ("loss", engine.metrics["loss"], 4)
    assert Path(best["checkpoint"]).is_file()
    assert result["objective"] == {"metric": "loss", "rule": "less", "value": best["value"], "iteration": 4}
    assert result["progress"]["epoch"] == 2
    assert result["seconds"] > sum(result["hook_seconds"].values()) > 0
    assert result["versions"]["torch"] == torch.__version__
    assert returned is engine.outcome.result
    assert returned.status == "finished"


@pytest.mark.parametrize(
    ("save_best", "targets", "scores", "metric", "rule", "value", "at"),
    [
        ("loss", math.nan, [0.1, 0.2], "loss", "less", math.nan, 4),
        ("score", 1.0, [0.3, 0.2], "score", "greater", 0.3, 2),
        (None, 1.0, [0.3, 0.2], "score", "greater", 0.3, 2),
        (None, 1.0, [0.3, math.nan], "score", "greater", 0.3, 2),
    ],
)
def test_the_objective_is_the_best_validation_by_the_first_metric_of_save_best_or_of_the_task(
    tmp_path: Path, save_best: str | None, targets: float, scores: list[float],
    metric: str, rule: str, value: float, at: int,
) -> None:  # fmt: skip
    """A sweep and result.json have the same one, and NaN stays NaN: no other metric takes its place."""
    task = Task(torch.nn.Linear(3, 1), torch.nn.MSELoss(), {"score": Scripted(scores, higher_is_better=True)})
    hooks = {"runtime_info": RuntimeInfoHook(), "checkpoint": CheckpointHook(save_best=save_best)}
    val = [(torch.randn(4, 3), torch.full((4, 1), targets))]
    make_engine(tmp_path, hooks, task=task, val=val, max_epochs=2, sanity_val_steps=0).train()
    of_job = ended_from_result(JobState(0, "running"), tmp_path)
    assert of_job is not None
    assert of_job.value == pytest.approx(value, nan_ok=True)
    assert (of_job.metric, of_job.rule, of_job.step) == (metric, rule, at)
    written = _read(tmp_path)["objective"]
    assert {**written, "value": 0} == {"metric": metric, "rule": rule, "value": 0, "iteration": at}
    assert float(written["value"]) == pytest.approx(value, nan_ok=True)
    best = _read(tmp_path)["best"]
    assert best is None if math.isnan(value) else (best["value"], best["checkpoint"] is None) == (value, not save_best)


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert Result.read(tmp_path) is None
    best, objective = Best("loss", -math.inf, 3, "best.pth"), Objective("loss", "less", 0.5, 3)
    written = Result("stopped", reason="enough", val_metrics={"loss": math.inf}, best=best, objective=objective)
    written.write(tmp_path)
    assert Result.read(tmp_path) == written
    for old in ('{"status": "finished", "error": null, "of_another_program": 1}', '{"status": "failed"}'):
        (tmp_path / "result.json").write_text(old)
        assert Result.read(tmp_path) == Result(json.loads(old)["status"])
    for damaged in ("", "[1]", "{}", '{"status": "fini', '{"status": "done"}', '{"status": "failed", "best": {}}'):
        (tmp_path / "result.json").write_text(damaged)
        assert Result.read(tmp_path) is None


def test_the_file_of_an_earlier_attempt_is_not_read(tmp_path: Path) -> None:
    Result("finished").write(tmp_path)
    assert Result.read(tmp_path, earlier=digest(tmp_path)) is None
    assert Result.read(tmp_path, earlier="0" * 8) == Result("finished")


MISTAKE = UserError("no such metric", key="hooks.mine.monitor", remedy="Try loss.")
STOP = at("after_train_iter", lambda engine: engine.request_stop("early_stopping: loss stands still"))
ENDS: dict[str, tuple[Hook, Status, str | None, str | None, int]] = {
    # how it ends: (the hook that ends it, status, error, reason, completed iterations)
    "error": (failing("after_train_iter", nth=2), "failed", "RuntimeError: on purpose", None, 2),
    "error at the end": (failing("after_train"), "failed", "RuntimeError: on purpose", None, 5),
    "mistake of the user": (failing("before_run", MISTAKE), "failed", str(MISTAKE), None, 0),
    "stop": (STOP, "stopped", None, "early_stopping: loss stands still", 1),
    "Ctrl-C": (
        failing("after_train_iter", KeyboardInterrupt()),
        "interrupted",
        "interrupted by Ctrl-C (SIGINT)",
        None,
        1,
    ),
}


@pytest.mark.parametrize("how", ENDS)
def test_how_a_run_has_ended(how: str, tmp_path: Path) -> None:
    hook, *expected = ENDS[how]
    with pytest.raises((RuntimeError, UserError, KeyboardInterrupt)) if how != "stop" else nullcontext():
        make_engine(tmp_path, {"mine": hook}, train=batches(5), max_epochs=1).train()
    result = _read(tmp_path)
    assert [result["status"], result["error"], result["reason"], result["progress"]["iteration"]] == expected
    assert result["best"] is None


def test_a_result_that_cannot_be_written_does_not_hide_the_error_of_the_run(tmp_path: Path) -> None:
    engine = make_engine(tmp_path / "not there", {"failing": failing("after_train_iter")})
    with pytest.raises(RuntimeError, match="on purpose"):
        engine.train()


@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_long_error_is_described_by_its_begin_and_its_end(lines: int) -> None:
    text = describe(ValueError("first\n" + "\n".join(["x" * (5_000_000 // lines)] * lines) + "\nlast"))
    assert len(text) < 2200
    first, *_, last = text.splitlines()
    assert (first, last) == ("ValueError: first", "last")
    assert " characters are left out: the log has them" in text


def test_a_secret_in_a_long_error_is_not_cut_into_two_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_TOKEN", "kQ81sdf7Zp02")
    for place in range(970, 1000, 2):
        assert "kQ" not in describe(UserError(f"{'x' * place} kQ81sdf7Zp02 {'y' * 5000}"))


def test_a_launcher_writes_the_error_that_rank_0_did_not_know(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"status": "finished", "error": null}')  # of an earlier attempt
    file = ResultFile(tmp_path)
    assert not file.is_complete
    file.set_error(ValueError("killed early"))
    assert not file.is_complete
    assert _read(tmp_path)["error"] == "ValueError: killed early"
    Result(status="failed", error="another rank was lost", val_metrics={"loss": 1.0}).write(tmp_path)
    file.set_error(Terminated(SIGTERM))
    found = _read(tmp_path)
    assert (found["status"], found["error"]) == ("interrupted", "interrupted by SIGTERM")
    assert found["val_metrics"] == {"loss": 1.0}
    Result("finished").write(tmp_path)
    assert file.is_complete


def test_an_attempt_that_fails_as_the_one_before_it_writes_another_file(tmp_path: Path) -> None:
    """Otherwise a controller would not know that the second attempt has written its error."""
    error = ValueError("no such model")
    ResultFile(tmp_path).set_error(error)
    file = ResultFile(tmp_path)
    time.sleep(0.001)
    file.set_error(error)
    assert file.has(error)


@pytest.mark.parametrize("earlier", [None, '{"status": "finished"}'])
def test_an_attempt_that_trained_nothing_leaves_the_earlier_result(tmp_path: Path, earlier: str | None) -> None:
    path, attempt = tmp_path / "result.json", tmp_path / "attempt"
    attempt.mkdir()
    if earlier is not None:
        path.write_text(earlier)
    file = ResultFile(tmp_path, attempt)
    file.set_error(ValueError("another model"))
    file.put_back()
    assert _read(attempt)["error"] == "ValueError: another model"
    assert (path.read_text() if path.exists() else None) == earlier
