"""The data sets and the exported model of a run at MLflow.

The model has the form of `mlflow.pytorch.log_model(…, serialization_format="pt2")`. That function imports torch and
pandas and exports the model again, so the folder is written here.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import yaml

from hydraloop.tracking.mlflow.address import VARIABLE
from hydraloop.tracking.tracker import Attempt, Run

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

EXPORTED, _MODEL = "export/model.json", "model.pt2"
"""What `hooks/shared/model_export.py` writes last in the run directory, and the file next to it."""
NAME = "model"
"""Name of the model at MLflow."""
_MARK = "hydraloop.export"
"""Tag by which a model is found again: when its files were written."""


def _data_sets(data: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield (name, options) of each data set in a config: `val`, or of several `val/a`, `val/b`."""
    for split in ("train", "val", "test"):
        options = data.get(split)
        if isinstance(options, dict) and "_target_" not in options:
            yield from ((f"{split}/{name}", each) for name, each in options.items())
        else:
            yield split, options


def log_data_sets(client: MlflowClient, run_id: str, attempt: Attempt) -> None:
    """Log the data sets of an attempt as inputs of a run. May be repeated.

    The digest is that of a data set's options: data that changed under the same options is not noticed.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    inputs = []
    for split, options in _data_sets((yaml.safe_load(attempt.config) or {}).get("data") or {}):
        if isinstance(options, dict) and "_target_" in options:
            source = json.dumps(options, sort_keys=True)
            size = attempt.samples.get(split)
            data = Dataset(
                name=str(options["_target_"]).rpartition(".")[2],
                digest=hashlib.sha256(source.encode()).hexdigest()[:8],
                source_type="config",
                source=source,
                profile=None if size is None else json.dumps({"num_rows": size}),
            )
            inputs.append(DatasetInput(data, [InputTag("mlflow.data.context", split)]))
    if inputs:
        client.log_inputs(run_id, inputs)


def send_model(client: MlflowClient, run: Run, registered: str | None, experiment_id: str, run_id: str) -> None:
    """Log the exported model of a run: as a model of the run, and as a version of a registered model.

    May be repeated: a model that was created is used again.

    Args:
        registered: name of the registered model; None does not register it.
    """
    from mlflow.entities import LoggedModelOutput

    path = run.run_dir / EXPORTED
    mark, about = str(path.stat().st_mtime_ns), json.loads(path.read_text(encoding="utf-8"))
    found = client.search_logged_models([experiment_id], f"source_run_id = '{run_id}' AND tags.`{_MARK}` = '{mark}'")
    if found:
        model = found[0]
    else:
        model = client.create_logged_model(experiment_id, NAME, run_id, tags={_MARK: mark}, model_type="pytorch")
    with TemporaryDirectory() as temporary:
        _write(Path(temporary), path.with_name(_MODEL), model, about)
        client.log_model_artifacts(model.model_id, temporary)
    outputs = client.get_run(run_id).outputs
    if outputs is None or all(one.model_id != model.model_id for one in outputs.model_outputs):
        client.log_outputs(run_id, [LoggedModelOutput(model.model_id, step=about["iteration"])])
    client.finalize_logged_model(model.model_id, "READY")
    if registered is not None:
        _register(client, registered, run_id, model)


def _register(client: MlflowClient, name: str, run_id: str, model: LoggedModel) -> None:
    """Add a version to a registered model, which is created if necessary, unless it has the model already."""
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = f"models:/{model.model_id}"  # with another one, MLflow's page does not name the model
    versions = client.search_model_versions(f"run_id = '{run_id}'")
    if not any((version.name, version.source) == (name, source) for version in versions):
        with _default_address(client.tracking_uri):
            version = client.create_model_version(name, source, run_id, model_id=model.model_id, await_creation_for=0)
        shown = json.dumps([{"name": name, "version": version.version}])
        client.set_logged_model_tags(model.model_id, {"mlflow.modelVersions": shown})


@contextmanager
def _default_address(uri: str) -> Iterator[None]:
    """Make an address MLflow's default in the body: a database looks for `models:/<id>` there, not at its own."""
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = uri
    try:
        yield
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before


def _write(folder: Path, exported: Path, model: LoggedModel, about: dict[str, Any]) -> None:
    """Write MLflow's folder of an exported model."""
    import mlflow

    (folder / "data").mkdir()
    (folder / "data" / _MODEL).symlink_to(exported)
    function = {"loader_module": "mlflow.pytorch", "data": "data", "env": {"virtualenv": "python_env.yaml"}}
    content: dict[str, Any] = {
        "artifact_path": model.artifact_location,
        "flavors": {
            "pytorch": {"model_data": "data", "pytorch_version": about["torch"], "code": None},
            "python_function": {**function, "python_version": about["python"]},
        },
        "mlflow_version": mlflow.__version__,
        "model_id": model.model_id,
        "model_uuid": model.model_id,
        "run_id": model.source_run_id,
    }
    if about["inputs"] is not None:
        outputs = None if about["outputs"] is None else _schema(about["outputs"])
        content["signature"] = {"inputs": _schema(about["inputs"]), "outputs": outputs, "params": None}
    if about["example"] is not None:
        (folder / "input_example.json").write_text(json.dumps(about["example"]))
        content["saved_input_example_info"] = {"artifact_path": "input_example.json", "type": "ndarray"}
    packages = [f"mlflow=={mlflow.__version__}", f"torch=={about['torch'].partition('+')[0]}"]
    (folder / "requirements.txt").write_text("\n".join(packages) + "\n")
    python = {"python": about["python"], "dependencies": ["-r requirements.txt"]}
    for name, part in (("MLmodel", content), ("python_env.yaml", python)):
        (folder / name).write_text(yaml.safe_dump(part))


def _schema(specs: list[dict[str, Any]]) -> str:
    """Return the tensors of a signature in MLflow's form."""
    tensors = [{"type": "tensor", "tensor-spec": {"dtype": spec["dtype"], "shape": spec["shape"]}} for spec in specs]
    names = [{"name": spec["name"]} if "name" in spec else {} for spec in specs]
    return json.dumps([{**tensor, **name} for tensor, name in zip(tensors, names, strict=True)])
