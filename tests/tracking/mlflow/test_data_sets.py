"""Data sets are inputs of a run at MLflow."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from hydraloop.tracking.mlflow.data_sets import log_data_sets
from tests.tracking.mlflow.runs import QUIET, attempt, client, empty_database, folder, opened, run_in

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


def test_data_sets_are_inputs_of_the_run(folder: Path) -> None:
    options = {"_target_": "hydraloop.examples.Digits", "split": "train"}
    config = json.dumps({"data": {"train": options, "val": {**options, "split": "val"}, "loader": {"batch_size": 4}}})
    tracker = opened(run_in(folder / "run"))
    for _ in range(2):  # a call may be repeated
        log_data_sets(client(), tracker.memory["run_id"], replace(attempt(config=config), samples={"train": 1437}))
        logged = client().get_run(tracker.memory["run_id"]).inputs
        assert logged is not None
        inputs = logged.dataset_inputs
        found = sorted((one.tags[0].value, one.dataset.name, one.dataset.profile) for one in inputs)
        assert found == [("train", "Digits", '{"num_rows": 1437}'), ("val", "Digits", None)]
        assert {json.loads(one.dataset.source)["split"] for one in inputs} == {"train", "val"}
        assert len({one.dataset.digest for one in inputs}) == 2


def test_each_of_several_data_sets_is_an_input(folder: Path) -> None:
    options = {"_target_": "hydraloop.examples.Digits"}
    val = {name: {**options, "split": name} for name in ("a", "b")}
    config = json.dumps({"data": {"train": options, "val": val, "test": None}})
    tracker = opened(run_in(folder / "run"))
    log_data_sets(client(), tracker.memory["run_id"], replace(attempt(config=config), samples={"val/b": 3}))
    inputs = client().get_run(tracker.memory["run_id"]).inputs.dataset_inputs
    found = {tag.value: one.dataset.profile for one in inputs for tag in one.tags}
    assert found == {"train": None, "val/a": None, "val/b": '{"num_rows": 3}'}
