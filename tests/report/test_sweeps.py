"""The page of a sweep, whose states are written by hand, and of a search, whose jobs are played."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import pytest

from hydraloop.files.metrics_writer import RecordLog
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.report.written import HOSTILE, Page, report, write_run
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
    times = ((10, 30), (20, 40), (0, 10), (0, 20), (30, 35), (40, 50))
    jobs = {n: finished(value) for n, value in enumerate((0.8, 0.9, 0.7, 0.95))}
    jobs |= {4: finished(math.nan, **failed), 5: finished(None, **failed)}
    write(made, {n: jobs[n] | {"attempt_times": (times[n],), "iterations": 10 * (n + 1)} for n in jobs})
    write_records(made, 0, 1, 2, 3)
    assert report(made.path) == 0
    page = Page(made.path / "report.html")
    progress = ["Best accuracy by trials", "Best accuracy by iterations", "Jobs by time and slot"]
    assert page.captions == [*progress, "val/accuracy", "train/loss", "accuracy over lr"], "a seed is no choice"
    for title, ends in ((progress[0], [1, 2, 3]), (progress[1], [70, 100, 210])):
        dots, line = page.figure(title)["data"]
        assert (dots["x"], dots["y"]) == (ends[::-1], [None, 0.85, 0.825]), "the mean over the seeds"
        assert (line["x"], line["y"]) == (ends, [0.825, 0.85, 0.85])
    bars = {bar["name"]: dict(zip(bar["text"], bar["y"], strict=True)) for bar in page.figure(progress[2])["data"]}
    assert page.figure(progress[2])["layout"]["uniformtext"]["mode"] == "hide", "a number that does not fit"
    assert bars == {"finished": {2: 1, 3: 2, 0: 1, 1: 2}, "failed": {4: 1, 5: 1}}, "the slot of each job"
    assert page.links == {f"#job-{number}" for number in range(6)} == page.links & page.targets
    assert page.commands[0] == "python train.py optimizer.lr=1e-3,1e-2,1e9 seed=0,1 engine.max_epochs=3"
    assert page.commands[1] == "python train.py -m optimizer.lr=1e-3 seed=0,1 engine.max_epochs=3"
    assert "mean accuracy 0.8500 over 2 of 2 jobs" in page.text
    assert f"ValueError: {HOSTILE}" in page.text
    assert "img" not in page.tags
    names = [trace["name"] for trace in page.figure("train/loss")["data"]]
    assert names == ["job 2", "best average: job 0", "best average: job 1", "job 3"], "the best results are on top"
    assert page.facts["jobs"] == "6"


def test_what_was_tried_has_axes_by_kind(tmp_path: Path) -> None:
    made = sweep(tmp_path / "sweep", "optimizer.lr=1e-4,3e-4,1e-2,0.1", "model='small',big", "data.size=.inf,8")
    write(made, {n: finished(n / 10) for n in range(16)})
    assert report(made.path) == 0
    page = Page(made.path / "report.html")
    assert page.captions == ["accuracy over lr", "accuracy over model", "accuracy over size"]
    lr, model, size = map(page.figure, page.captions)
    assert lr["layout"]["xaxis"]["type"] == "log"
    assert "type" not in lr["layout"]["yaxis"]
    assert model["layout"]["xaxis"]["ticktext"] == ["small", "big"]
    assert size["layout"]["xaxis"]["ticktext"] == [".inf", "8"]
    (dots,) = lr["data"]
    assert dots["hovertemplate"][-1].startswith("job 15<br>optimizer.lr=0.1<br>")
    assert dots["marker"]["color"] == [*["#868e96"] * 15, "#e8590c"], "the best tenth is on top, in orange"


def test_a_sweep_that_is_not_over_says_how_far_it_is_and_a_large_one_what_is_left_out(tmp_path: Path) -> None:
    made = sweep(tmp_path / "sweep", "lr=1,2", f"seed={','.join(map(str, range(600)))}", average="none")
    write(made, {0: finished(0.8), 1: {"state": "running"}, 2: finished(None, state="failed", error="no")})
    made.controller_lock.acquire()
    try:
        assert report(made.path) == 0
    finally:
        made.controller_lock.release()
    page = Page(made.path / "report.html")
    assert page.facts["jobs"] == "2 of 1,200 are over"
    assert '<span class="badge running">running</span>' in page.body
    assert "Left out: all but the best 500 jobs" in page.text
    assert report(made.path) == 0
    assert '</h1><span class="badge interrupted">interrupted</span>' in Page(made.path / "report.html").body


def test_a_page_that_is_followed_is_written_until_the_sweep_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made = sweep(tmp_path / "sweep", "lr=1,2")
    write(made, {0: finished(0.8), 1: {"state": "running"}})
    made.controller_lock.acquire()
    reloads = []

    def wait(seconds: float) -> None:
        reloads.append(re.findall(r'data-reload="(.*?)"', (made.path / "report.html").read_text()))
        write(made, {1: finished(0.9)})
        made.controller_lock.release()

    monkeypatch.setattr("hydraloop.commands.report.time.sleep", wait)
    assert report(made.path, "--follow") == 0
    page = Page(made.path / "report.html")
    assert (reloads, 'data-reload=""' in page.source, page.facts["finished"]) == ([["10"]], True, "2")
    assert capsys.readouterr().out.count("report.html") == 1


def test_pruned_trials_are_drawn_with_the_objective_at_their_last_rung(tmp_path: Path) -> None:
    options = {"trials": 6, "sampler": "random", "promote": "asha", "objectives": {"time": "min"}}
    search = changed(Search(tmp_path, (LR,), options, validations=9), as_time)
    search.run()
    assert [trial.state for trial in search.history().trials].count("complete") == 1
    assert report(search.directory.path) == 0
    page = Page(search.directory.path / "report.html")
    hollow = " (hollow: not trained to the end)"
    progress = [f"Best time by {what}{hollow}" for what in ("trials", "iterations")]
    assert page.captions == [*progress, "Jobs by time and slot", f"time over lr{hollow}"]
    assert page.figure(f"time over lr{hollow}")["layout"]["yaxis"]["title"]["text"] == "time [s]"
    (dots,) = page.figure(f"time over lr{hollow}")["data"]
    assert Counter(dots["marker"]["symbol"]) == {"circle-open": 5, "circle": 1}
    states = {state.number: state for state in search.directory.states()}
    for text, value in zip(dots["hovertemplate"], dots["y"], strict=True):
        job = states[int(re.match(r"job (\d+)<br>", text)[1])]  # type: ignore[index]
        assert value == job.seconds, "what it monitors is the accuracy"
    bars = page.figure("Jobs by time and slot")["data"]
    assert sum(len(bar["x"]) for bar in bars) == sum(state.attempts for state in states.values()) > 6


@pytest.mark.parametrize("objectives", [{}, {"accuracy": "max", "time": "min"}])
def test_a_search_has_its_figures(tmp_path: Path, objectives: dict[str, str]) -> None:
    options = {"trials": 12, "sampler": "random", "objectives": objectives}
    search = Search(tmp_path, (LR, f"task=b,'{HOSTILE.replace(' ', '')}'" if not objectives else "task=b,a"), options)
    (changed(search, as_time) if objectives else search).run()
    directory = SweepDirectory.load(search.directory.path)
    write_records(directory, 0, 1)
    assert report(directory.path) == 0
    page = Page(directory.path / "report.html")
    names = list(objectives) or ["loss"]
    wanted = [f"{name} over {key}" for name in names for key in ("lr", "task")]
    front = ["Pareto front in orange"] if objectives else []
    progress = [] if objectives else ["Best loss by trials", "Best loss by iterations"]
    progress.append("Jobs by time and slot")
    drawn = [title for title in page.captions if "/" not in title]
    assert drawn == [*progress, *wanted, *front, "Importance of keys (PED-ANOVA, 1 in all)"]
    assert page.figure(wanted[1])["layout"]["xaxis"]["ticktext"][0] == "b", "the order of the search space"
    assert "img" not in page.tags
    assert page.links == {f"#job-{number}" for number in range(12)}
    assert "\\u003c" not in page.source.replace("\\u003cbr>", "").replace("\\u003cextra>", "").replace(
        "\\u003c/extra>", ""
    )


def test_a_sweep_and_a_run_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = sweep(tmp_path / "sweep", "seed=0,1,2")
    assert report(made.path, made.path) == 2
    assert "only runs are compared" in capsys.readouterr().err


def test_the_page_of_a_job_that_waits_shows_the_state_that_the_sweep_knows(tmp_path: Path) -> None:
    made = sweep(tmp_path / "sweep", "seed=0,1")
    write(made, {0: {"state": "queued", "directory": "0"}})
    write_run(made.folder(0))
    (made.folder(0) / "result.json").unlink()
    assert report(made.folder(0)) == 0
    assert '<span class="badge queued">' in Page(made.folder(0) / "report.html").body
