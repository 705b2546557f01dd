"""Experiments and runs at MLflow: found or made, with parameters and tags within its limits."""

from __future__ import annotations

import logging
import math
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hydraloop.safety.secrets import mask_text, masked
from hydraloop.tracking.mlflow.address import restoring, sqlite_path
from hydraloop.tracking.mlflow.names import Names, clean
from hydraloop.tracking.tracker import Run, Sweep, UnusableError

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

log = logging.getLogger(__name__)

UID = "hydraloop.run"
"""The tag by which a run is found again."""
EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"
"""The variable of MLflow's own."""
_ADDRESS = ("tracking_uri", "environment", "folder")
_PARAMS_AT_ONCE, _METRICS_AT_ONCE = 100, 1000
"""What a server takes in one call."""
_LONGEST_TAG = 5000
"""Characters that every version of MLflow takes."""


def experiment_of(client: MlflowClient, name: str, uri: str) -> str:
    """The id of an experiment, which is made where there is none.

    Raises:
        UnusableError: it was deleted; MLflow keeps its name until it is gone for good.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        path = sqlite_path(uri)
        # Beside the database: MLflow itself would take the working directory of whoever comes first.
        files = None if path is None else str(path.parent / "mlruns" / clean(name).replace("/", "_"))
        try:
            return str(client.create_experiment(name, artifact_location=files))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found = client.get_experiment_by_name(name)  # another job was faster
    assert found is not None, "it exists already"
    if found.lifecycle_stage == "deleted":
        raise UnusableError(
            f"experiment {name!r} was deleted there; "
            f"{restoring(uri, f'experiments restore -x {found.experiment_id}')} brings it back, "
            "or use another: hooks.mlflow.experiment=…"
        )
    return str(found.experiment_id)


def find(client: MlflowClient, experiment_id: str, uid: str) -> str | None:
    """The run with a tag `hydraloop.run`: made by a process that died before it could write down the id."""
    found = client.search_runs([experiment_id], f"tags.`{UID}` = '{uid}'", max_results=1)
    return str(found[0].info.run_id) if found else None


def find_running(client: MlflowClient, experiment: str, run_dir: str) -> str | None:
    """The run in a directory, for whoever knows no more of it; None while it is not there.

    The newest one that has not ended: the directory may have been deleted and used again.
    """
    found = client.get_experiment_by_name(experiment)
    if found is None:
        return None
    value = tag_value(run_dir)
    quote = '"' if "'" in value else "'"
    ours = client.search_runs(
        [found.experiment_id],
        f"tags.`run_dir` = {quote}{value}{quote} AND attributes.status = 'RUNNING'",
        max_results=1,
        order_by=["attributes.start_time DESC"],
    )
    return str(ours[0].info.run_id) if ours else None


def create(client: MlflowClient, experiment_id: str, name: str, tags: Mapping[str, str], began: float) -> str:
    """A new run. Returns its id."""
    run = client.create_run(experiment_id, start_time=round(began * 1000), tags=dict(tags), run_name=name)
    return str(run.info.run_id)


def tags_of(run: Run, chosen: Mapping[str, Any]) -> dict[str, str]:
    """A new run's tags: MLflow's own names where it has one, and the user's."""
    given = dict(run.attempts[0].tags)
    script = shlex.split(given.get("command", ""))[1:2]
    ours = {"mlflow.source.git.commit": given.pop("git_commit", None), "mlflow.user": given.pop("user", None)}
    if script:
        ours |= {"mlflow.source.name": script[0], "mlflow.source.type": "LOCAL"}
    if run.sweep is not None:
        given |= {"sweep": run.sweep.name, "job": str(run.sweep.job)}
    given |= {name: value for name, value in ours.items() if value is not None}
    return {**_as_tags(given), **_as_tags(chosen), UID: run.uid}  # that one is nobody's to choose


def parent_tags(sweep: Sweep, chosen: Mapping[str, Any]) -> dict[str, str]:
    """The same of a sweep's parent run."""
    given = {"sweep": sweep.name, "sweep_dir": str(sweep.folder)}
    return {**_as_tags(given), **_as_tags(chosen), UID: sweep.uid}


def _as_tags(tags: Mapping[str, Any]) -> dict[str, str]:
    return {clean(str(name)): tag_value(str(value)) for name, value in tags.items()}


def drop_tags(client: MlflowClient, run_id: str, names: Sequence[str]) -> None:
    """Delete those of a run's tags that are there."""
    there = client.get_run(run_id).data.tags
    for name in names:
        if name in there:
            client.delete_tag(run_id, name)


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """A hook's options as they may be sent: all are masked but the address, by which a server is asked."""
    texts = {name: mask_text(value) if isinstance(value, str) else value for name, value in options.items()}
    tags = {mask_text(str(name)): value for name, value in (masked(options.get("tags")) or {}).items()}
    return {**texts, "tags": tags, **{name: options[name] for name in _ADDRESS if name in options}}


def experiment_name(options: Mapping[str, Any], default: str) -> str:
    """The experiment's: of the options, else of the environment, as MLflow itself takes it, else `default`."""
    return mask_text(options.get("experiment") or os.environ.get(EXPERIMENT) or default)


def tag_value(text: str) -> str:
    """A text within MLflow's limit."""
    return text if len(text) <= _LONGEST_TAG else f"{text[: _LONGEST_TAG - 1]}…"


def log_points(client: MlflowClient, run_id: str, metrics: Sequence[Metric]) -> None:
    """Log points of metrics, as many at once as a server takes. Those that are there already are not there twice."""
    from mlflow.exceptions import MlflowException

    for start in range(0, len(metrics), _METRICS_AT_ONCE):
        batch = metrics[start : start + _METRICS_AT_ONCE]
        try:
            client.log_batch(run_id, metrics=batch)
        except MlflowException as error:
            if "IntegrityError" not in str(error):
                raise
            # Older versions (3.13) do not find a NaN again that they have.
            there = {
                (key, point.step, point.timestamp, as_kept(point.value))
                for key in {metric.key for metric in batch}
                for point in client.get_metric_history(run_id, key)
            }
            new = [one for one in batch if (one.key, one.step, one.timestamp, as_kept(one.value)) not in there]
            client.log_batch(run_id, metrics=new)


def as_kept(value: float) -> float | str:
    """A value as a database gives it back: without infinity, and equal to itself."""
    if math.isnan(value):
        return "nan"
    return max(min(value, sys.float_info.max), -sys.float_info.max)


def log_params(client: MlflowClient, run_id: str, params: Mapping[str, Any], *, prefix: str = "") -> None:
    """Log parameters, a hundred at a time. What is too long for one is only named: config.yaml has it."""
    from mlflow.entities import Param
    from mlflow.exceptions import MlflowException
    from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

    names = Names({})
    names.new(prefix + key for key in params)
    texts = {names.of(prefix + key): _text(value) for key, value in params.items()}
    all_of_them = [
        Param(key, text if len(text) <= MAX_PARAM_VAL_LENGTH else _marker(text)) for key, text in texts.items()
    ]
    for start in range(0, len(all_of_them), _PARAMS_AT_ONCE):
        batch = all_of_them[start : start + _PARAMS_AT_ONCE]
        try:
            client.log_batch(run_id, params=batch)
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            for param in batch:
                _log_one(client, run_id, param)


def _log_one(client: MlflowClient, run_id: str, param: Any) -> None:
    """One of a batch that was refused: an older server takes shorter values."""
    from mlflow.entities import Param
    from mlflow.exceptions import MlflowException

    for one in (param, Param(param.key, _marker(param.value))):
        try:
            client.log_batch(run_id, params=[one])
            return
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            problem = error
    log.warning("parameter %s is left out: %s", param.key, problem)


def _text(value: Any) -> str:
    """A value as it stands in the config."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _marker(text: str) -> str:
    return f"({len(text)} characters: see config.yaml)"
