"""What a sweep's controller finds out about its jobs' trackers."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from hydraloop.tracking.sweeps import SweepTrackers

MLFLOW = {"_target_": "hydraloop.hooks.MLflowLoggerHook", "priority": None, "on_error": "warn"}


def test_the_trackers_of_whatever_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    trackers = SweepTrackers()
    for hooks in (
        {},
        {"ema": {"_target_": "hydraloop.hooks.EMAHook"}, "gone": None},
        {"mlflow": {**MLFLOW, "tracking_uri": "sqlite:///runs/${experiment_name}.db"}},
        {"mlflow": {**MLFLOW, "tracking_uri": "another"}},
    ):
        trackers.see(OmegaConf.create({"experiment_name": "digits", "default_hooks": {}, "hooks": hooks}))
    options = {"tracking_uri": "sqlite:///runs/digits.db", "folder": str(tmp_path)}
    assert trackers.found == {"mlflow": {"kind": "mlflow", "options": options, "experiment": "digits", "jobs": 2}}
    assert not trackers.unknown


def test_what_only_a_job_knows_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    number = "${hydra:job.num}"
    hooks = {
        "tensorboard": {"_target_": "hydraloop.hooks.TensorBoardLoggerHook", "flush_timeout": number},
        "mlflow": {**MLFLOW, "tracking_uri": f"sqlite:///{number}.db", "tags": {"job": number, "a": "b"}},
        "other": {**MLFLOW, "run_name": "x"},
    }
    trackers = SweepTrackers()
    trackers.see(OmegaConf.create({"experiment_name": number, "default_hooks": {}, "hooks": hooks}))
    assert trackers.found["tensorboard"] == {"kind": "tensorboard"}
    assert trackers.unknown == {"mlflow": ["tracking_uri", "tags", "experiment_name"], "other": ["experiment_name"]}
    assert trackers.found["other"]["options"] == {"run_name": "x", "folder": str(tmp_path)}
    del trackers.found["other"], trackers.unknown["other"]
    with caplog.at_level(logging.WARNING, "hydraloop"):
        trackers.begin(tmp_path)
        trackers.end()  # nobody knows where
    assert (tmp_path / "tracking" / "sweep.json").exists()
    assert [one.getMessage() for one in caplog.records] == [
        "mlflow: the jobs create its parent run: only they know tracking_uri"
    ]
    assert [path.name for path in (tmp_path / "tracking").iterdir()] == ["sweep.json"]


def test_without_a_tracker_nothing_is_written(tmp_path: Path) -> None:
    trackers = SweepTrackers()
    trackers.begin(tmp_path)
    trackers.end()
    assert not list(tmp_path.iterdir())
