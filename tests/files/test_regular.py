"""Files of a run that come from somebody else: no reader waits for a pipe, fills the memory or fails at a deep file."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hydraloop.engine.checkpoint import format as checkpoint_format
from hydraloop.errors import UserError
from hydraloop.files import (
    atomic,
    checkpoint_files,
    config_yaml,
    integrity,
    lock,
    metrics_log,
    metrics_writer,
    run_directory,
)
from hydraloop.files.result import Result, digest
from hydraloop.sweeps import job_states, sweep_directory
from hydraloop.tracking.cursor import Cursor

METRICS = "metrics.jsonl"
DEEP = "[" * 200_000 + "]" * 200_000
READERS: dict[str, tuple[str, Callable[[Path], Any], Any]] = {
    "result": ("result.json", Result.read, None),
    "its digest": ("result.json", digest, None),
    "state of a job": (job_states.FILENAME, job_states.read, None),
    "sweep": (sweep_directory.FILENAME, sweep_directory.read_description, UserError),
    "holder of a lock": (".lock.json", lock._hint, lock.Holder()),
    "checkpoint": ("a.pth", lambda folder: integrity.damage(folder / "a.pth") is not None, True),
    "last checkpoint": ("last_checkpoint", checkpoint_files.candidates, []),
    "overrides": (".hydra/overrides.yaml", run_directory.typed_overrides, []),
    "config": ("config.yaml", lambda folder: config_yaml.loaded(folder / "config.yaml", "it"), UserError),
    "records": ("metrics.jsonl", lambda folder: list(metrics_log.read_all(folder / "metrics.jsonl")), OSError),
    "end of the records": ("metrics.jsonl", lambda folder: metrics_log.read_end(folder / METRICS, 99), OSError),
    "number of records": ("metrics.jsonl", lambda folder: metrics_log.count(folder / METRICS), OSError),
    "cuts of the records": (
        "metrics.cuts.jsonl",
        lambda folder: metrics_writer.cuts(folder / METRICS),
        OSError,
    ),
    "cursor": ("tracking/mine.cursor.json", lambda folder: Cursor.load(folder, "mine"), None),
}


def read(folder: Path, reader: Callable[[Path], Any], expected: Any) -> None:
    if isinstance(expected, type):
        with pytest.raises(expected):
            reader(folder)
    else:
        assert reader(folder) == expected


@pytest.mark.parametrize("name", READERS)
def test_a_pipe_is_not_waited_for(name: str, tmp_path: Path) -> None:
    file, reader, expected = READERS[name]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    os.mkfifo(tmp_path / file)
    read(tmp_path, reader, expected)


@pytest.mark.parametrize("name", [name for name in READERS if not READERS[name][0].endswith(("jsonl", "checkpoint"))])
def test_a_deep_file_is_damaged(name: str, tmp_path: Path) -> None:
    file, reader, expected = READERS[name]
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_text(DEEP)
    if name != "its digest":
        read(tmp_path, reader, expected)


def test_a_deep_record_is_damaged(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"a": {DEEP}}}\n')
    assert [record.is_damaged for record in metrics_log.read_all(tmp_path / "metrics.jsonl")] == [True]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: &a [x]\nb: [*a, *a]\n", "it has an alias"),
        ("a: " + "[" * 150 + "]" * 150, "it is deeper than"),
        ('a: "\\ud800"\n', "cannot be read"),
        ("a: " + "x" * 1_000_000, "has more than"),
    ],
    ids=["aliases", "deep", "half a surrogate pair", "long"],
)
def test_a_config_that_no_run_writes_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=problem):
        config_yaml.loaded(tmp_path / "config.yaml", "it")


def test_a_file_without_end_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_bytes(b" " * 1000)
    with pytest.raises(OSError, match="has more than 999 bytes"):
        atomic.read_bytes(tmp_path / "result.json", 999)
    with pytest.raises(OSError, match="is not a regular file"):
        atomic.read_bytes(Path("/dev/zero"))


def test_a_checkpoint_of_zeros_in_a_small_archive_is_not_loaded(tmp_path: Path) -> None:
    file = tmp_path / "epoch_1.pth"
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("epoch_1/data.pkl", bytes(50_000_000))
    with pytest.raises(UserError, match="is damaged: its members are compressed"):
        checkpoint_format.load(file, key="resume")
    assert "table of contents" in str(integrity.damage(file))
