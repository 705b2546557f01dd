"""The exported model of a run at MLflow: it loads without its code and gives the same outputs."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import pyfunc, pytorch, set_registry_uri, set_tracking_uri
from torch import Tensor, nn

from hydraloop.engine.checkpoint.format import evaluation_weights, load
from hydraloop.hooks.checkpoint.hook import CheckpointHook
from hydraloop.hooks.ema.hook import EMAHook
from hydraloop.hooks.shared.model_export import ModelExport
from hydraloop.tasks.task import Task
from hydraloop.tracking.mlflow.models import log_data_sets
from hydraloop.tracking.mlflow.tracker import MLflowTracker
from hydraloop.tracking.tracker import Finish
from tests.helpers import batches, make_engine
from tests.tracking.mlflow.runs import (
    QUIET,
    attempt,
    client,
    empty_database,
    exported_files,
    folder,
    opened,
    run_in,
    send_files,
)

__all__ = ["empty_database", "folder"]
pytestmark = QUIET


@pytest.fixture
def loaders(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """MLflow's loaders use a global address, which they also write to the environment."""
    uri = f"sqlite:///{folder}/mlflow.db"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", uri)
    set_tracking_uri(uri)
    set_registry_uri(uri)
    yield
    set_tracking_uri(None)  # type: ignore[arg-type]  # none, so that the environment counts
    set_registry_uri("")


def exported(run_dir: Path, task: nn.Module | None = None, **hooks: Any) -> Any:
    """An engine that has trained, with the files of the export."""
    engine = make_engine(run_dir, {"checkpoint": CheckpointHook(), **hooks}, task=task, val=batches(1))
    export = ModelExport()
    export.see(batches(1)[0])
    engine.train()
    export.write(engine, "hooks.mlflow.log_model")
    return engine


def finish(tracker: MLflowTracker) -> None:
    """Send what a tracker sends at the end of the run."""
    tracker.finish(Finish("finished"))
    send_files(tracker)


@pytest.mark.slow  # torch.export, and MLflow's loader
@pytest.mark.usefixtures("loaders")
def test_the_model_loads_and_gives_the_same_outputs(folder: Path) -> None:
    run = run_in(folder / "run")
    engine = exported(run.run_dir, ema=EMAHook(), checkpoint=CheckpointHook(save_best="loss"))
    tracker = opened(run, log_model=True, registered_model_name="digits")
    finish(tracker)
    del tracker.memory["stored"]["model.json"]  # it failed in the last step
    assert tracker.send_file()
    assert not tracker.send_file(), "once"
    (version,) = client().search_model_versions("name = 'digits'")
    (model,) = client().search_logged_models([tracker.memory["experiment_id"]])
    assert (version.run_id, version.source) == (tracker.memory["run_id"], f"models:/{model.model_id}")
    assert model.source_run_id == tracker.memory["run_id"]
    outputs = client().get_run(tracker.memory["run_id"]).outputs
    assert outputs is not None
    assert [one.model_id for one in outputs.model_outputs] == [model.model_id]

    loaded = pytorch.load_model("models:/digits/1")
    expected = nn.Linear(3, 1)
    expected.load_state_dict(evaluation_weights(load(Path(engine.best.checkpoint))))
    for size in (1, 2, 7):
        inputs = torch.randn(size, 3)
        assert torch.equal(loaded(inputs), expected(inputs))
    served = pyfunc.load_model(model.model_uri)
    assert served.metadata.signature.inputs.to_dict() == [
        {"type": "tensor", "tensor-spec": {"dtype": "float32", "shape": (-1, 3)}}
    ]
    assert served.input_example.shape == (2, 3)
    assert torch.equal(torch.from_numpy(served.predict(inputs.numpy())), expected(inputs).detach())


@pytest.mark.slow
def test_a_model_is_registered_at_the_address_of_the_run(
    tmp_path: Path, empty_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is read from or written to MLflow's default database, `mlflow.db` in the working directory."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(empty_database, tmp_path / "elsewhere.db")
    run = run_in(tmp_path / "run")
    exported_files(run.run_dir)
    tracker = opened(run, tracking_uri="sqlite:///elsewhere.db", log_model=True, registered_model_name="digits")
    finish(tracker)
    there = client(f"sqlite:///{tmp_path}/elsewhere.db")
    (version,) = there.search_model_versions("name = 'digits'")
    assert version.run_id == tracker.memory["run_id"]
    assert not (tmp_path / "mlflow.db").exists()


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


class _Refused(nn.Linear):
    def forward(self, inputs: Tensor) -> Tensor:
        outputs = super().forward(inputs)
        return outputs * 2 if outputs.sum() > 0 else outputs


@pytest.mark.slow  # torch.export
def test_a_model_that_torch_export_refuses_is_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    run = run_in(folder / "run")
    with caplog.at_level(logging.WARNING, "hydraloop"):
        exported(run.run_dir, Task(_Refused(3, 1), nn.MSELoss()))
    (record,) = caplog.records
    assert "def forward" not in capfd.readouterr().err, "torch prints the graph"
    assert record.getMessage().startswith("hooks.mlflow.log_model: the model is not exported: ")
    assert "\n" not in record.getMessage()
    tracker = opened(run, log_model=True)
    finish(tracker)
    assert client().search_logged_models([tracker.memory["experiment_id"]]) == []


class _Named(nn.Module):
    """Takes and returns several tensors, like models of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 1)

    def forward(self, inputs: Tensor, *, mask: Tensor | None = None) -> dict[str, Tensor]:
        return {"logits": self.linear(inputs) * (1 if mask is None else mask)}


class _NamedTask(Task):
    engine: Any

    def call_model(self, inputs: Any, targets: Any) -> Any:
        self.engine.records.log_text("inputs", str(inputs.shape))
        return self.model(inputs, mask=torch.ones(len(inputs), 1))["logits"]


@pytest.mark.slow  # torch.export
@pytest.mark.usefixtures("loaders")
def test_several_inputs_and_outputs_have_names(folder: Path) -> None:
    run = run_in(folder / "run")
    exported(run.run_dir, _NamedTask(_Named(), nn.MSELoss()))
    tracker = opened(run, log_model=True)
    finish(tracker)
    (model,) = client().search_logged_models([tracker.memory["experiment_id"]])
    inputs = torch.randn(5, 3)
    loaded = pytorch.load_model(model.model_uri)
    assert loaded(inputs, mask=torch.zeros(5, 1))["logits"].abs().sum() == 0
    signature = pyfunc.load_model(model.model_uri).metadata.signature
    assert signature.inputs.input_names() == ["inputs", "mask"]
    assert signature.outputs.input_names() == ["logits"]
