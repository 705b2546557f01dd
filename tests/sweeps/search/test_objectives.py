"""What a search is told of a job: the objective that was asked for, at rungs too, and one metric for all jobs."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydraloop.files.result import Objective, Result
from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.search_history import Validations, measure
from tests.sweeps.search.played import LR, Search, distance
from tests.sweeps.search.test_search import ASHA


def changed(search: Search, change: Callable[[Result, tuple[str, ...]], Result]) -> Search:
    """Let each job end in another way, by its overrides."""
    write = search._write

    def changing(request: Any, result: Result) -> None:
        write(request, change(result, request.lines))

    search._write = changing  # type: ignore[method-assign]
    return search


def as_time(result: Result, lines: tuple[str, ...]) -> Result:
    """What the job monitors gets worse when its time gets better."""
    assert result.value is not None
    return replace(result, seconds=result.value, objective=Objective("accuracy", "greater", 1 - result.value, 1))


def test_rungs_compare_the_objective_and_not_what_a_job_monitors(tmp_path: Path) -> None:
    options = {**ASHA, "trials": 9, "objectives": {"time": "min"}}
    search = changed(Search(tmp_path, options=options, validations=9), as_time)
    search.run()
    history = search.history()
    best = min(history.trials, key=lambda trial: distance({key: str(value) for key, value in trial.params.items()}))
    assert (best.state, history.metrics, history.rules) == ("complete", ("time",), ("less",))


def test_all_objectives_are_from_the_best_validation(tmp_path: Path) -> None:
    """A Pareto front of values of several validations would have points that no checkpoint reaches."""
    search = Search(tmp_path / "search", options={"trials": 1, "objectives": {"accuracy": "max", "loss": "min"}})
    with (tmp_path / "metrics.jsonl").open("w") as log:
        for at, (accuracy, loss) in enumerate(((0.5, 0.1), (0.75, 0.2), (0.7, 0.3)), 1):
            record = {"mode": "val", "epoch": at, "iteration": at, "accuracy": accuracy, "loss": loss, "timestamp": 1.0}
            log.write(json.dumps(record) + "\n")
    Result("finished", val_metrics={"accuracy": 0.7, "loss": 0.3}).write(tmp_path)
    job = JobState(0, "finished", metric="accuracy", rule="greater", value=0.75, step=2)
    assert measure(job, tmp_path, search.search).values == (0.75, 0.2)


def test_jobs_that_monitor_other_metrics_are_not_compared(tmp_path: Path) -> None:
    def other(result: Result, lines: tuple[str, ...]) -> Result:
        return replace(result, objective=Objective("accuracy", "greater", 0.5, 1)) if "task=b" in lines else result

    loop = changed(Search(tmp_path, (LR, "task=a,b"), {"trials": 20}), other).run()
    assert loop.problem is not None
    assert loop.problem.key == "sweep.objectives"
    assert "and not" in loop.problem.problem


def test_a_trial_with_a_failed_job_is_failed(tmp_path: Path) -> None:
    """Its other jobs are pruned."""
    search = Search(tmp_path, (LR, "seed=0,1,2"), {"trials": 4})
    search.loss = lambda values: math.nan if values["seed"] == "1" else 1.0
    search.run()
    assert {trial.state for trial in search.history().trials} == {"failed"}


def test_only_new_validations_of_a_job_that_runs_are_read(tmp_path: Path) -> None:
    """Also those of a log that the other process is just writing to."""
    log, found = tmp_path / "metrics.jsonl", Validations(tmp_path, "loss")
    assert list(found.read()) == []
    line = '{"mode": "%s", "epoch": 1, "iteration": 1, "loss": %s, "timestamp": 1.0}\n'
    log.write_text(line % ("train", 9) + line % ("val", 3) + (line % ("val", 2))[:20])
    assert list(found.read()) == [(1, 3.0)]
    log.write_text("x" * log.stat().st_size + (line % ("val", 2))[20:] + line % ("val", 1))
    assert list(found.read()) == [(2, 1.0)], "what was read is not read again"
