"""The page of a sweep, whose states are written by hand, and of a search, whose jobs are played."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hydraloop.files.metrics_writer import RecordLog
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.report.written import HOSTILE, Page, report
from tests.sweeps.search.played import LR, Search
from tests.sweeps.search.test_objectives import as_time, changed
from tests.sweeps.written import finished, sweep, write


def write_records(directory: SweepDirectory, *jobs: int) -> None:
    """Write records of jobs: training reaches iteration 40, or 20 in odd ones."""
    for job in jobs:
        log = RecordLog(directory.folder(job) / "metrics.jsonl")
        for iteration in range(1, 21 if job % 2 else 41):
            loss = {1: math.inf, 2: 1e300}.get(iteration, job + 1 / iteration)
            log.append({"mode": "train", "epoch": 1, "iteration": iteration, "loss": loss})
        log.append({"mode": "val", "epoch": 1, "iteration": 20, "accuracy": 0.1 * job})
        log.close()


def test_a_sweep_has_its_best_average_its_curves_and_its_failures(tmp_path: Path) -> None:
    made = sweep(tmp_path / "sweep", "optimizer.lr=1e-3,1e-2,1e9", "seed=0,1", "engine.max_epochs=3")
    failed = {"state": "failed", "error": f"ValueError: {HOSTILE}\nmore"}
    told = {n: finished(value) for n, value in enumerate((0.8, 0.9, 0.7, 0.95))}
    write(made, told | {4: finished(math.nan, **failed), 5: finished(None, **failed)})
    write_records(made, 0, 1, 2, 3)
    assert report(made.path) == 0
    page = Page(made.path / "report.html")
    assert page.captions == ["val/accuracy", "train/loss"], "four jobs with a result are too few for what was tried"
    assert page.commands[0] == "python train.py optimizer.lr=1e-3,1e-2,1e9 seed=0,1 engine.max_epochs=3"
    assert page.commands[1] == "python train.py -m optimizer.lr=1e-3 seed=0,1 engine.max_epochs=3"
    assert "mean accuracy 0.8500 over 2 of 2 jobs" in page.text
    assert f"ValueError: {HOSTILE}" in page.text
    assert page.tags.isdisjoint({"a", "img"})
    names = [trace["name"] for trace in page.figures[1]["data"]]
    assert names == ["job 2", "best: job 0", "best: job 1", "job 3"], "the best results are on top"
    assert "still runs" not in page.text


def test_what_was_tried_has_axes_by_kind(tmp_path: Path) -> None:
    made = sweep(tmp_path / "sweep", "optimizer.lr=1e-4,3e-4,1e-2,0.1", "model='small',big", "data.size=.inf,8")
    write(made, {n: finished(n / 10) for n in range(16)})
    assert report(made.path) == 0
    page = Page(made.path / "report.html")
    parallel, lr, model, size = page.figures
    assert page.captions[1:] == ["accuracy over lr", "accuracy over model", "accuracy over size"]
    assert lr["layout"]["xaxis"]["type"] == "log"
    assert "type" not in lr["layout"]["yaxis"]
    assert model["layout"]["xaxis"]["ticktext"] == ["small", "big"]
    assert size["layout"]["xaxis"]["ticktext"] == [".inf", "8"]
    best = parallel["data"][-1]
    assert best["hovertemplate"].startswith("job 15<br>optimizer.lr=0.1<br>")
    assert best["y"] == [1.0, 1.0, 1.0, 1.0]
    assert {trace["line"]["color"] for trace in parallel["data"]} == {"#e8590c", "#868e96"}, "visible on white"


def test_a_sweep_that_is_not_over_says_how_far_it_is_and_a_large_one_what_is_left_out(tmp_path: Path) -> None:
    made = sweep(tmp_path / "sweep", f"seed={','.join(map(str, range(1200)))}", average="none")
    write(made, {0: finished(0.8), 1: {"state": "running"}, 2: finished(None, state="failed", error="no")})
    made.controller_lock.acquire()
    try:
        assert report(made.path) == 0
    finally:
        made.controller_lock.release()
    text = Page(made.path / "report.html").text
    assert "This sweep still runs: 2 of 1,200 jobs are over." in text
    assert "Left out: all but the best 500 of 1,200 jobs" in text
    assert report(made.path) == 0
    assert "This sweep has not ended" in Page(made.path / "report.html").text


def test_trials_that_have_ended_early_are_drawn_with_their_last_value(tmp_path: Path) -> None:
    search = Search(tmp_path, (LR,), {"trials": 6, "sampler": "random", "promote": "asha"}, validations=9)
    search.run()
    assert [trial.state for trial in search.history().trials].count("complete") == 1
    assert report(search.directory.path) == 0
    page = Page(search.directory.path / "report.html")
    assert page.captions == ["loss over lr"]
    assert len(page.figures[0]["data"][0]["x"]) == 6


@pytest.mark.parametrize("objectives", [{}, {"accuracy": "max", "time": "min"}])
def test_a_search_has_its_figures(tmp_path: Path, objectives: dict[str, str]) -> None:
    options = {"trials": 12, "sampler": "random", "objectives": objectives}
    search = Search(tmp_path, (LR, f"task=a,'{HOSTILE.replace(' ', '')}'" if not objectives else "task=a,b"), options)
    (changed(search, as_time) if objectives else search).run()
    directory = SweepDirectory.load(search.directory.path)
    write_records(directory, 0, 1)
    assert report(directory.path) == 0
    page = Page(directory.path / "report.html")
    names = list(objectives) or ["loss"]
    wanted = [f"{name} over {key}" for name in names for key in ("lr", "task")]
    front = ["Pareto front (orange)"] if objectives else []
    drawn = [title for title in page.captions if "/" not in title]
    parallel = f"Parallel coordinates: {names[0]} (the best tenth in orange)"
    assert drawn == [parallel, *wanted, *front, "Importance of keys (PED-ANOVA, 1 in all)"]
    assert page.tags.isdisjoint({"a", "img"})
    assert "\\u003c" not in page.source.replace("\\u003cbr>", "").replace("\\u003cextra>", "").replace(
        "\\u003c/extra>", ""
    )


def test_a_sweep_and_a_run_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = sweep(tmp_path / "sweep", "seed=0,1,2")
    assert report(made.path, made.path) == 2
    assert "only runs are compared" in capsys.readouterr().err
