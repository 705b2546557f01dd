"""The data sets of a run at MLflow."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import yaml

from hydraloop.tracking.tracker import Attempt

if TYPE_CHECKING:
    from mlflow import MlflowClient


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
