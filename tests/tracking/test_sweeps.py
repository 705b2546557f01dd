"""What a sweep's controller finds of its jobs' trackers."""

from __future__ import annotations

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
    assert trackers.found == {"mlflow": {"kind": "mlflow", "options": options, "experiment": "digits"}}


def test_without_a_tracker_nothing_is_written(tmp_path: Path) -> None:
    trackers = SweepTrackers()
    trackers.begin(tmp_path)
    trackers.end()
    assert not list(tmp_path.iterdir())
