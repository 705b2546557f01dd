"""The page of a run, and the comparison of runs. Their files are written by hand."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from hydraloop.commands.report.run_data import Curve, RunData, charts
from hydraloop.files.lock import RunLock
from hydraloop.files.metrics_writer import RecordLog
from hydraloop.files.result import Best, Result
from tests.report.written import HOSTILE, Page, report, write_run


def test_a_run_has_its_curves_its_config_and_what_hooks_have_logged(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    media = run / "media" / "val"
    media.mkdir(parents=True)
    log = RecordLog(run / "metrics.jsonl")
    for iteration in range(1, 31):
        Image.new("RGB", (9, 9), (iteration, 0, 0)).save(media / f"seen_iter_{iteration}.png")
        picture = {"kind": "image", "name": "seen", "path": f"media/val/seen_iter_{iteration}.png"}
        log.append({"mode": "val", "epoch": 1, "iteration": iteration, "objects": [picture]})
    (media / "worst.json").write_text(json.dumps({"columns": ["index", "loss"], "rows": [[7, 2.5]]}))
    worst = {"kind": "table", "name": "worst", "path": "media/val/worst.json"}
    log.append({"mode": "val", "epoch": 1, "iteration": 200, "objects": [worst]})
    log.close()
    resumed = run / ".hydra" / "resume_1"
    resumed.mkdir()
    (resumed / "overrides.yaml").write_text("[engine.max_epochs=9]")
    repeated = run / ".hydra" / "resume_2"
    repeated.mkdir()
    (repeated / "overrides.yaml").write_text("[seed=1, resume=auto]")
    assert report(run) == 0
    page = Page(run / "report.html")
    curves = ["loss", "accuracy", "Learning rate", "Time of an iteration [s]"]
    assert page.captions == [*curves, "val/seen, iteration 30", "val/worst, iteration 200"]
    assert "finished" in page.text
    assert page.body.count("data:image/png;base64,") == 1
    assert '<th scope="col">loss</th>' in page.body
    assert "optimizer:\n  lr: 0.01" in page.text
    assert page.facts["accuracy"] == "0.9500 (no best checkpoint)"
    assert page.facts["memory"] == "100 MiB"
    known = {"model": "Net", "parameters": "4,547", "data": "Spirals: train 9 samples", "experiment": "arms"}
    assert page.facts.items() >= known.items()
    commands = [f"optimizer.lr=0.01 hydra.run.dir={run}", f"resume {run} engine.max_epochs=9", f"seed=1 resume={run}"]
    assert page.commands == ["\n".join(f"python train.py {words}" for words in commands)]


def test_the_test_at_the_end_is_drawn_where_its_checkpoint_was_saved(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", count=10)
    log = RecordLog(run / "metrics.jsonl")
    for iteration in (50, 100):  # the first one is of the run before it was continued
        log.append({"mode": "test", "epoch": 1, "iteration": iteration, "accuracy": 0.7})
    log.close()
    kept = Best("accuracy", 0.8, 60, str(run / "checkpoints" / "best_accuracy_epoch_1.pth"))
    Result("finished", best=kept, progress={"iteration": 100}).write(run)
    assert RunData(run).curves["test/accuracy"].iterations.tolist() == [50, 60]


@pytest.mark.parametrize(("last", "titles"), [(104.0, []), (106.0, ["Peak memory [MiB]"])])
def test_a_chart_of_memory_needs_a_change(last: float, titles: list[str]) -> None:
    memory = Curve(np.array([10, 20]), np.array([100.0, last]))
    assert [title for title, _ in charts({"run": {"perf/memory": memory}})] == titles


def test_names_with_html_are_text(tmp_path: Path) -> None:
    run = write_run(tmp_path / HOSTILE.replace("/", "|"), name=HOSTILE, lr="0.1")
    (run / ".hydra" / "config.yaml").write_text(json.dumps({HOSTILE: {HOSTILE: HOSTILE}}))
    (run / ".hydra" / "overrides.yaml").write_text(json.dumps([f"a={HOSTILE}"]))
    other = write_run(tmp_path / "other")
    for arguments in ([run], [run, other]):
        assert report(*arguments, "--output", tmp_path / "page.html") == 0
        page = Page(tmp_path / "page.html")
        assert page.tags.isdisjoint({"a", "img", "iframe", "object", "base", "form"})
        assert not [name for name in page.attributes if name.startswith("on") or name in ("href", "src")]
        assert HOSTILE in page.text
        drawn = json.dumps(page.figures)
        assert "<" not in drawn
        assert "alert(1)" in drawn


def no_records(run: Path) -> None:
    (run / "metrics.jsonl").unlink()


def torn_line(run: Path) -> None:
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"mode": "val", "epoch": 1, "iter')


def without_a_config(run: Path) -> None:
    (run / "result.json").unlink()
    (run / ".hydra" / "config.yaml").write_text("optimizer: [1")


def failed(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    (run / "result.json").write_text(json.dumps(result | {"status": "failed", "error": "ValueError: no"}))
    (run / "train.log").write_text("first line\n" + "x\n" * 100 + "\x1b[31mlast line\x1b[0m")


def of_another_program(run: Path) -> None:
    odd = {"status": "finished", "seconds": 1, "objective": None, "git": ["a"], "test_metrics": {}}
    (run / "result.json").write_text(json.dumps(odd))
    (run / ".hydra" / "config.yaml").write_text("task: [1]\ndata: {train: {_target_: [1]}}\nexperiment_name: {a: 1}\n")


def links_out_of_the_run(run: Path) -> None:
    secret = run.parent / "secret.png"
    Image.new("RGB", (9, 9)).save(secret)
    (run / "link.png").symlink_to(secret)
    (run / "fake.png").write_bytes(b"<svg onload=alert(1)>")
    log = RecordLog(run / "metrics.jsonl")
    for name in ("link", "fake"):
        told = {"kind": "image", "name": name, "path": f"{name}.png"}
        log.append({"mode": "val", "epoch": 1, "iteration": 5, "objects": [told]})
    log.close()


@pytest.mark.parametrize(
    ("damage", "shown", "hidden"),
    [
        (no_records, "There are no records.", "Learning rate"),
        (torn_line, "finished", "no records"),
        (without_a_config, "The run has no config.", "finished"),
        (failed, "last line", "first line"),
        (of_another_program, "The run has no result.json", "finished"),
        (links_out_of_the_run, "Not shown: val/link (image)", "data:image"),
    ],
)
def test_a_run_with_damaged_or_missing_files(
    tmp_path: Path, damage: Callable[[Path], None], shown: str, hidden: str
) -> None:
    run = write_run(tmp_path / "run")
    damage(run)
    assert report(run) == 0
    body = Page(run / "report.html").body
    assert shown in body
    assert hidden not in body


def test_a_run_that_trains_is_shown_as_running(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "result.json").unlink()
    lock = RunLock(run, key="run")
    lock.acquire()
    try:
        assert report(run) == 0
    finally:
        lock.release()
    assert "This run has not ended." in Page(run / "report.html").text


def test_runs_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [write_run(tmp_path / name, lr=lr) for name, lr in {"a": "0.1", "b": "0.01", "c": "0.1"}.items()]
    result = json.loads((runs[0] / "result.json").read_text())
    result["best"] = {"metric": "accuracy", "value": 0.95, "iteration": 200, "checkpoint": "best.pth"}
    (runs[0] / "result.json").write_text(json.dumps(result))
    monkeypatch.chdir(tmp_path)
    assert report(*runs) == 0
    page = Page(tmp_path / "report.html")
    [lr] = [figure for title, figure in zip(page.captions, page.figures, strict=True) if title == "Learning rate"]
    assert [trace["name"] for trace in lr["data"]] == ["a", "b", "c"]
    assert lr["data"][0]["y"]["dtype"] == "f4"
    assert len(base64.b64decode(lr["data"][0]["y"]["bdata"])) == 20 * 4
    looks = [tuple(trace["line"].values()) for trace in page.figure("Time of an iteration [s]")["data"]]
    assert len(looks) == len({*looks}) == 6, "the time, and what of it waits for data"
    assert page.commands == [f"python train.py optimizer.lr={lr}" for lr in ("0.1", "0.01", "0.1")]
    assert page.body.count('<th scope="col">accuracy</th>') == 1
    assert page.facts["model"] == "Net"
    assert '<th scope="col">model</th>' not in page.body
    row = "<tr><td><code>optimizer.lr</code></td><td>0.1</td><td>0.01</td><td>0.1</td></tr>"
    assert row in page.body
    assert "seed" not in page.body.partition("Differences of the configs")[2].partition("</table>")[0]


def test_a_file_that_is_no_report_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "run")
    assert report(run, "--output", run / "result.json") == 2
    assert "exists, and is not a report" in capsys.readouterr().err
    assert json.loads((run / "result.json").read_text())["status"] == "finished"
    assert report(run, "--output", run / "new" / "page.html") == 0
    assert [report(run), report(run)] == [0, 0]


def test_without_plotly_one_message_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hydraloop.commands.report.find_spec", lambda name: None)
    assert report(write_run(tmp_path / "run")) == 2
    assert capsys.readouterr().err.endswith("is not installed\n  pip install plotly\n")
