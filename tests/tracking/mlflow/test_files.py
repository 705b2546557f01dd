"""Artifacts of a run at MLflow: each is stored once, and none of them delays metrics."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
import threading
import zlib
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pandas
import pytest
from PIL import Image

from hydraloop.run_files.record_log import LoggedObject, Record
from hydraloop.tracking.mlflow.tracker import MLflowTracker
from hydraloop.tracking.tracker import MLFLOW, Finish
from tests.e2e.projects import REPOSITORY
from tests.tracking.mlflow.runs import (
    BEGAN,
    QUIET,
    artifacts,
    client,
    empty_database,
    folder,
    found,
    opened,
    run_in,
    send_files,
    stored,
    text,
    training,
)
from tests.tracking.runs import described_run, track

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


PICTURE = "visualization/val_iter_20.png"


def picture(run_dir: Path, index: int, name: str = PICTURE) -> Record:
    (run_dir / name).parent.mkdir(exist_ok=True)
    Image.new("RGB", (8, 8), "red").save(run_dir / name)
    return Record(index, "val", 1, 20, BEGAN + 20, {}, {}, (LoggedObject("image", "val/predictions", name),))


def images(tracker: MLflowTracker) -> list[str]:
    """Names of the stored pictures, without their small copies."""
    return [name for name in artifacts(tracker, "images") if name.endswith(".png")]


def test_a_picture_is_stored_once_and_shown_with_mlflow_s_own(folder: Path) -> None:
    run = run_in(folder / "run")
    tracker = opened(run)
    before = json.loads(json.dumps(tracker.memory))
    records = [picture(run.run_dir, 0)]
    for _ in range(2):
        tracker.send(records)
    send_files(tracker)
    again = opened(run, before)  # a process that died after it had stored the picture
    again.send(records)
    send_files(again)
    (name,) = images(tracker)
    assert name.startswith(f"images/val~predictions+step+20+timestamp+{round((BEGAN + 20) * 1000)}+")
    assert stored(tracker, name).read_bytes() == (run.run_dir / PICTURE).read_bytes()
    client().log_image(tracker.memory["run_id"], Image.new("RGB", (300, 10)), key="val/theirs", step=20, timestamp=1)
    mine, theirs = artifacts(tracker, "images")[:2], artifacts(tracker, "images")[2:]
    form = re.compile(r"images/val~\w+\+step\+20\+timestamp\+\d+\+[0-9a-f-]{36}(\.png|\+compressed\.webp)")
    assert all(form.fullmatch(name) for name in mine)
    assert len(theirs) == 2
    assert all(form.fullmatch(name) for name in theirs), "MLflow's names have this form"
    assert found(tracker).data.tags["mlflow.loggedImages"] == "True"


def test_pictures_with_long_names_are_stored_apart(folder: Path) -> None:
    run = run_in(folder / "run")
    tracker = opened(run)
    for index, end in enumerate("ab"):
        one = LoggedObject("image", f"val/{'ü' * 200}{end}", PICTURE)
        tracker.send([replace(picture(run.run_dir, index), objects=(one,))])
    send_files(tracker)
    assert len({name.partition("+")[0] for name in images(tracker)}) == 2


def test_objects_of_all_kinds(folder: Path) -> None:
    run = run_in(folder / "run")
    media = run.run_dir / "media" / "val"
    media.mkdir(parents=True)
    (media / "notes_iter_20.md").write_text("# Notes")
    (media / "rows_iter_20.json").write_text('{"columns": ["a", "b"], "rows": [[1, "ü"], [2, "x"]]}')
    (media / "weights_iter_20.json").write_text('{"weights": {"counts": [1]}}')
    (media / "model_iter_20.bin").write_bytes(b"x")
    names = {"text": "notes", "table": "rows", "histogram": "weights", "artifact": "model"}
    paths = {path.name.partition("_")[0]: f"media/val/{path.name}" for path in media.iterdir()}
    objects = tuple(LoggedObject(kind, f"val/{name}", paths[name]) for kind, name in names.items())  # type: ignore[arg-type]
    tracker = opened(run, pictures=False)
    tracker.send([replace(picture(run.run_dir, 0), objects=objects)])
    send_files(tracker)
    assert artifacts(tracker, "media/val") == sorted(paths.values())
    assert text(tracker, paths["notes"]) == "# Notes"
    table = pandas.read_json(stored(tracker, paths["rows"]), orient="split")  # as `load_table` does
    assert table.to_dict("list") == {"a": [1, 2], "b": ["ü", "x"]}
    listed = json.loads(found(tracker).data.tags["mlflow.loggedArtifacts"])
    assert listed == [{"path": paths["rows"], "type": "table"}]


def test_objects_that_are_not_there_or_damaged(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    run = run_in(folder / "run")
    tracker = opened(run)
    names = ["gone.png", "text.png", "cut.png", "size.png"]
    records = [picture(run.run_dir, index, f"visualization/{name}") for index, name in enumerate(names)]
    gone, broken, cut, size = [run.run_dir / record.objects[0].path for record in records]
    gone.unlink()
    broken.write_bytes(b"no picture")
    cut.write_bytes(size.read_bytes()[:40])
    content = bytearray(size.read_bytes())
    content[16:24] = b"\x00\x01\x00\x00" * 2  # more pixels than anybody has memory for
    content[29:33] = zlib.crc32(content[12:29]).to_bytes(4, "big")
    size.write_bytes(content)
    others = (LoggedObject("table", "val/t", "visualization/text.png"), LoggedObject("text", "val/x", "gone.md"))
    tracker.send([*records, replace(records[0], objects=others)])
    tracker.finish(Finish("finished"))
    send_files(tracker)
    said = [one.levelname for one in caplog.records if "is not stored" in one.getMessage()]
    assert said == ["WARNING", "INFO", "INFO", "INFO", "INFO", "INFO"]
    assert artifacts(tracker) == ["config.yaml"]
    assert found(tracker).info.status == "FINISHED"


def test_pictures_are_an_option(folder: Path) -> None:
    run = run_in(folder / "run")
    tracker = opened(run, pictures=False)
    tracker.send([picture(run.run_dir, 0)])
    send_files(tracker)
    assert images(tracker) == []


def test_a_picture_that_was_cut_before_it_was_stored(folder: Path) -> None:
    run = run_in(folder / "run")
    tracker = opened(run)
    record = picture(run.run_dir, 0)
    tracker.send([record])
    later = MLflowTracker({"system_metrics": False}, run, json.loads(json.dumps(tracker.memory)))
    later.rewound(0)
    later.open()
    later.send([Record(0, "val", 1, 20, BEGAN + 80, {}, {}, record.objects)])
    send_files(later)
    (name,) = images(tracker)
    assert f"timestamp+{round((BEGAN + 80) * 1000)}+" in name


def checkpoint(path: Path, content: str = "weights") -> None:
    path.parent.mkdir(exist_ok=True)
    with ZipFile(path, "w") as file:
        file.writestr("data", content)


@pytest.mark.parametrize(
    ("which", "expected"),
    [
        (None, []),
        ("best", ["best_accuracy_epoch_1.pth"]),
        ("last", ["epoch_2.pth"]),
        ("all", ["best_accuracy_epoch_1.pth", "epoch_1.pth", "epoch_2.pth"]),
    ],
)
def test_checkpoints_are_an_option(folder: Path, which: str | None, expected: list[str]) -> None:
    run = run_in(folder / "run")
    checkpoints = run.run_dir / "checkpoints"
    for name in ("best_accuracy_epoch_1.pth", "epoch_1.pth", "epoch_2.pth"):
        checkpoint(checkpoints / name)
    (checkpoints / "last_checkpoint").write_text("epoch_2.pth\n")
    (checkpoints / "epoch_3.pth").write_bytes((checkpoints / "epoch_1.pth").read_bytes()[:20])
    best: dict[str, Any] = {"metric": "accuracy", "value": 1.0, "iteration": 10}
    best["checkpoint"] = "/moved/checkpoints/best_accuracy_epoch_1.pth"
    (run.run_dir / "result.json").write_text(json.dumps({"status": "finished", "best": best}))
    tracker = opened(run, checkpoints=which)
    send_files(tracker)
    assert artifacts(tracker, "checkpoints") == [f"checkpoints/{name}" for name in expected if which == "all"]
    tracker.finish(Finish("finished"))
    send_files(tracker)
    assert artifacts(tracker, "checkpoints") == [f"checkpoints/{name}" for name in expected]


def test_a_checkpoint_that_changes_is_stored_again(folder: Path) -> None:
    run = run_in(folder / "run")
    tracker = opened(run, checkpoints="all")
    for content in ("first", "second one"):
        checkpoint(run.run_dir / "checkpoints" / "epoch_1.pth", content)
        send_files(tracker)
        with ZipFile(stored(tracker, "checkpoints/epoch_1.pth")) as file:
            assert file.read("data").decode() == content


def test_metrics_arrive_where_files_cannot_be_stored(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    client().create_experiment("elsewhere", artifact_location="nowhere://bucket/path")
    tracker = opened(run_in(folder / "run"), experiment="elsewhere")
    tracker.send(training(0, 2))
    send_files(tracker)
    tracker.finish(Finish("finished"))
    assert found(tracker).info.status == "FINISHED"
    assert caplog.text.count("are not stored") == 1


def test_files_that_could_not_be_stored_are_sent_when_they_can(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The store of the files is a folder that cannot be created at first."""
    (folder / "store").touch()
    client().create_experiment("elsewhere", artifact_location=str(folder / "store" / "here"))
    run = run_in(folder / "run")
    checkpoint(run.run_dir / "checkpoints" / "epoch_1.pth")
    tracker = opened(run, experiment="elsewhere", checkpoints="all")
    tracker.send([picture(run.run_dir, 0)])
    send_files(tracker)
    assert caplog.text.count("are not stored") == 1
    (folder / "store").unlink()
    later = opened(run, json.loads(json.dumps(tracker.memory)), checkpoints="all")
    send_files(later)
    assert artifacts(later) == ["checkpoints", "config.yaml", "images"]
    assert artifacts(later, "checkpoints") == ["checkpoints/epoch_1.pth"]


class _Refusing(BaseHTTPRequestHandler):
    """A store of files that accepts none."""

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(413)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
def test_the_signature_of_an_address_is_not_shown(folder: Path) -> None:
    run = described_run(folder / "run")
    options = {"system_metrics": False, "folder": str(folder), "experiment": "elsewhere"}
    track(run.run_dir, "mlflow", MLFLOW, options)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        query = "X-Amz-Security-Token=FwoGZXIvYXdz%2F&X-Amz-Signature=0a1b2c3d4e"
        client().create_experiment("elsewhere", f"http://127.0.0.1:{server.server_port}/store?{query}")
        done = subprocess.run(
            [sys.executable, "-m", "hydraloop", "sync", "run"],
            env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
            capture_output=True,
            text=True,
            check=False,
        )
        server.shutdown()
    assert "a file is not stored: 413 Client Error" in done.stderr
    assert "X-Amz-Security-Token=***&X-Amz-Signature=***" in done.stderr
    assert not any(secret in done.stdout + done.stderr for secret in ("FwoG", "0a1b"))


def test_no_secret_of_the_result_is_stored(folder: Path) -> None:
    run = run_in(folder / "run")
    result = {"status": "failed", "error": "https://me:hunter2hunter2@host/x", "best": None}
    (run.run_dir / "result.json").write_text(json.dumps(result))
    tracker = opened(run)
    tracker.finish(Finish("failed", "no"))
    send_files(tracker)
    assert "hunter2" not in text(tracker, "result.json")
    assert json.loads(text(tracker, "result.json"))["best"] is None
