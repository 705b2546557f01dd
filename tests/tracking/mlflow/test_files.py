"""Artifacts of a run at MLflow: each is stored once, and none of them delays metrics."""

from __future__ import annotations

import json
import logging
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from PIL import Image

from hydraloop.files.metrics_log import LoggedObject, Record
from hydraloop.tracking.mlflow import MLflowTracker
from hydraloop.tracking.tracker import Finish
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
)

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


def test_a_picture_is_stored_once_for_mlflow_s_charts(folder: Path) -> None:
    run = run_in(folder / "run")
    tracker = opened(run)
    before = json.loads(json.dumps(tracker.memory))
    records = [picture(run.run_dir, 0)]
    tracker.send(records)
    send_files(tracker)
    again = opened(run, before)  # a process that died after it had stored the picture
    again.send(records)
    send_files(again)
    (name,) = images(tracker)
    assert name.startswith(f"images/val~predictions+step+20+timestamp+{round((BEGAN + 20) * 1000)}+")
    assert Image.open(stored(tracker, name)).getpixel((0, 0)) == (255, 0, 0)
    assert found(tracker).data.tags["mlflow.loggedImages"] == "True"


@pytest.mark.parametrize("calls", [0, 1])
def test_a_picture_whose_storing_fails_halfway_is_there_once(
    folder: Path, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without any file, or with the first of two files."""
    from mlflow.store.artifact.local_artifact_repo import LocalArtifactRepository

    run = run_in(folder / "run")
    tracker = opened(run)
    send_files(tracker)
    tracker.send([picture(run.run_dir, 0)])
    left = iter([True] * calls)
    put = LocalArtifactRepository.log_artifact

    def fail(*arguments: Any) -> None:
        if not next(left, False):
            raise ConnectionError("it is gone")
        put(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LocalArtifactRepository, "log_artifact", fail)
        with pytest.raises(ConnectionError):
            tracker.send_file()
    send_files(tracker)
    assert len(images(tracker)) == 1
    assert found(tracker).data.tags["mlflow.loggedImages"] == "True"


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
    tracker = opened(run)
    tracker.send([replace(picture(run.run_dir, 0), objects=objects)])
    send_files(tracker)
    assert artifacts(tracker, "media/val") == sorted(paths.values())
    assert text(tracker, paths["notes"]) == "# Notes"
    assert json.loads(text(tracker, paths["rows"])) == {"columns": ["a", "b"], "data": [[1, "ü"], [2, "x"]]}


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
    tracker.finish(Finish("finished"))
    send_files(tracker)
    assert artifacts(tracker, "checkpoints") == [f"checkpoints/{name}" for name in expected]


def test_files_that_cannot_be_stored_are_one_warning_and_sent_later(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The store of the files is a folder that cannot be created at first. Metrics arrive."""
    (folder / "store").touch()
    client().create_experiment("elsewhere", artifact_location=str(folder / "store" / "here"))
    run = run_in(folder / "run")
    checkpoint(run.run_dir / "checkpoints" / "epoch_1.pth")
    tracker = opened(run, experiment="elsewhere", checkpoints="all")
    tracker.send([picture(run.run_dir, 0)])
    send_files(tracker)
    tracker.finish(Finish("finished"))
    send_files(tracker)
    assert caplog.text.count("are not stored") == 1
    assert found(tracker).info.status == "FINISHED"
    (folder / "store").unlink()
    later = opened(run, json.loads(json.dumps(tracker.memory)), checkpoints="all")
    later.finish(Finish("finished"))
    send_files(later)
    assert artifacts(later) == ["checkpoints", "config.yaml", "images"]
    assert artifacts(later, "checkpoints") == ["checkpoints/epoch_1.pth"]


def test_no_secret_of_the_result_is_stored(folder: Path) -> None:
    run = run_in(folder / "run")
    result = {"status": "failed", "error": "https://me:hunter2hunter2@host/x", "best": None}
    (run.run_dir / "result.json").write_text(json.dumps(result))
    tracker = opened(run)
    tracker.finish(Finish("failed", "no"))
    send_files(tracker)
    assert "hunter2" not in text(tracker, "result.json")
    assert json.loads(text(tracker, "result.json"))["best"] is None
