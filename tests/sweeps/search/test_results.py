"""What `results` and `status` say of a search with played jobs."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hydraloop.commands.command_line import view
from hydraloop.files.result import Result
from hydraloop.sweeps.executors.executor import Request
from hydraloop.sweeps.sweep_display import JobLines
from tests.sweeps.search.played import LR, Search, distance
from tests.sweeps.search.test_objectives import as_time, changed

WIDTH = "task.model.width=int(interval(1,64))"


class Timed(Search):
    """A search whose jobs take as many seconds and iterations as the model is wide. A wide one has a lower loss."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.loss = lambda values: distance(values) + 1 / int(values["task.model.width"])

    def _write(self, request: Request, result: Result) -> None:
        width = int(dict(line.split("=", 1) for line in request.lines)["task.model.width"])
        super()._write(request, replace(result, seconds=float(width), progress={"iteration": width}))


def shown(search: Search, capsys: pytest.CaptureFixture[str]) -> tuple[list[str], dict[str, Any]]:
    """The lines that `results` prints, and the file that it writes."""
    capsys.readouterr()
    assert view(["results", str(search.directory.path)]) == 0
    content: dict[str, Any] = json.loads((search.directory.path / "results.json").read_text())
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()], content


def test_the_table_the_best_and_the_importance(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = Timed(tmp_path, (LR, WIDTH), {"trials": 30, "sampler": "random"})
    search.run()
    lines, content = shown(search, capsys)
    assert lines[0].endswith(": 30 of 30 trials; jobs: 30 finished")
    best = search.best()
    exact = str(best.params["optimizer.lr"])
    assert f"optimizer.lr={exact}" in content["best"]["command"]
    assert f"  {content['best']['command']}" in lines
    rows = list(csv.DictReader((search.directory.path / "results.csv").read_text().splitlines()))
    assert (rows[0]["job"], rows[0]["optimizer.lr"]) == (str(best.number), exact)
    assert [line for line in lines if re.search(r"\d\.\d{8}", line)] == [f"  {content['best']['command']}"]
    importance = content["search"]["importance"]
    assert list(importance) == ["optimizer.lr", "task.model.width"]
    assert sum(importance.values()) == pytest.approx(1)
    assert lines[-1] == f"importance (PED-ANOVA, 1 in all): optimizer.lr {importance['optimizer.lr']:.2f}, " + (
        f"task.model.width {importance['task.model.width']:.2f}"
    )
    view(["status", str(search.directory.path)])
    assert "30 of 30 trials; jobs: 30 finished" in capsys.readouterr().out


def test_without_optuna_there_is_no_importance(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    search = Search(tmp_path, options={"trials": 10, "sampler": "random"})
    search.run()
    monkeypatch.setitem(sys.modules, "optuna", None)
    lines, content = shown(search, capsys)
    assert content["search"]["importance"] is None
    assert not any(line.startswith("importance") for line in lines)


def test_with_seeds_the_best_is_a_mean_over_all_of_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    search = Search(tmp_path, (LR, "seed=0,1,2"), {"trials": 8})
    search.loss = lambda values: distance(values) + int(values["seed"]) / 10
    search.run()
    lines, content = shown(search, capsys)
    best = search.best()
    assert content["best"]["jobs"] == [3 * best.number + seed for seed in range(3)]
    assert content["best"]["mean"] == pytest.approx(best.values[0])
    assert f" optimizer.lr={best.params['optimizer.lr']} seed=0,1,2" in content["best"]["command"]
    assert any(line.startswith("best: optimizer.lr=") and line.endswith("it runs again with") for line in lines)


def test_pruned_jobs_are_listed_after_the_finished_ones_with_objective_and_reason(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The jobs monitor another metric than the objective."""
    caplog.set_level("INFO")
    options = {"trials": 12, "promote": "asha", "objectives": {"time": "min"}}
    search = changed(Search(tmp_path, options=options, validations=9), as_time)
    search.loss = lambda values: distance(values) + 1 - 1e-3 * int(values.get("engine.pause_after", 0))
    search.run()
    lines, content = shown(search, capsys)
    states = [row["status"] for row in content["rows"]]
    assert states == sorted(states)
    assert set(states) == {"finished", "pruned"}
    assert content["best"]["status"] == "finished"
    pruned = [row["value"] for row in content["rows"] if row["status"] == "pruned"]
    assert pruned == sorted(pruned)
    reasons = Counter(row["reason"] for row in content["rows"] if row["status"] == "pruned")
    assert set(reasons) == {"not promoted at rung 1", "not promoted at rung 2"}
    assert Counter(line[-22:] for line in lines if " pruned " in line) == reasons
    last = content["rows"][-1]
    display = JobLines(search.directory)
    display.ended(search.directory.state(last["job"]))
    assert f" pruned: time {last['value']:.4g}, {last['reason']} (" in caplog.messages[-1]
    best = display.progress.best
    assert best is not None
    assert (best.number, best.metric, best.value) == (content["best"]["job"], "time", content["best"]["value"])
    assert view(["status", str(search.directory.path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[2].startswith("best: job ")
    assert said[3:] == [f"pruned: {count} jobs: {reason}" for reason, count in reasons.most_common()]


def test_several_objectives_have_a_pareto_front(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    objectives = {"objectives": {"loss": "min", "time": "min"}, "trials": 30, "sampler": "nsga2"}
    search = Timed(tmp_path, (LR, WIDTH), objectives)
    search.run()
    lines, content = shown(search, capsys)
    assert content["best"] is None
    assert not any(line.startswith("best") for line in lines)
    values = {row["job"]: (row["objectives"]["loss"], row["objectives"]["time"]) for row in content["rows"]}
    assert len(values) == 30
    front = [
        job
        for job, (loss, time) in values.items()
        if not any(a <= loss and b <= time and (a, b) != (loss, time) for a, b in values.values())
    ]
    found = content["search"]["pareto"]
    assert [point["trial"] for point in found] == sorted(front, key=lambda job: (*values[job], job))
    assert 1 < len(found) < 30
    lr = str(search.history().trials[found[0]["trial"]].params["optimizer.lr"])
    assert f"optimizer.lr={lr}" in found[0]["command"]
    titles = [line.split() for line in lines]
    assert titles[1] == ["job", "lr", "width", "status", "loss", "time", "step", "time", "checkpoint"]
    first = titles.index(["Pareto", "front"]) + 1
    assert titles[first] == ["job", "lr", "width", "loss", "time"]
    assert [int(cells[0]) for cells in titles[first + 1 :][: len(found)]] == [point["trial"] for point in found]
    (header, row, *_) = csv.reader((search.directory.path / "results.csv").read_text().splitlines())
    assert (header[-1], row[-1]) == ("time", str(values[int(row[0])][1]))
