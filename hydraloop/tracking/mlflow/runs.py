"""Experiments and runs at MLflow: finds or creates them, and keeps parameters and tags within MLflow's limits."""

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
"""Tag by which a run is found again."""
EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"
"""MLflow's environment variable."""
_ADDRESS = ("tracking_uri", "environment", "folder")
_PARAMS_AT_ONCE, _METRICS_AT_ONCE = 100, 1000
"""Most that a server accepts in one call."""
_LONGEST_TAG = 5000
"""Most characters of a tag that all versions of MLflow accept."""


def experiment_of(client: MlflowClient, name: str, uri: str) -> str:
    """Return the id of an experiment, which is created if it does not exist.

    Raises:
        UnusableError: the experiment was deleted. MLflow reserves its name until it is deleted permanently.
    """
    from mlflow.exceptions import MlflowException

    found = client.get_experiment_by_name(name)
    if found is None:
        path = sqlite_path(uri)
        # Next to the database. MLflow's default is the working directory of the process that creates the experiment.
        files = None if path is None else str(path.parent / "mlruns" / clean(name).replace("/", "_"))
        try:
            return str(client.create_experiment(name, artifact_location=files))
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found = client.get_experiment_by_name(name)  # another job has just created it
    assert found is not None, "it exists already"
    if found.lifecycle_stage == "deleted":
        raise UnusableError(
            f"experiment {name!r} was deleted there; restore it with "
            f"`{restoring(uri, f'experiments restore -x {found.experiment_id}')}`, "
            "or use another one: hooks.mlflow.experiment=…"
        )
    return str(found.experiment_id)


def find(client: MlflowClient, experiment_id: str, uid: str) -> str | None:
    """Return the run with a tag `hydraloop.run`, which an earlier process may have created before it was killed."""
    found = client.search_runs([experiment_id], f"tags.`{UID}` = '{uid}'", max_results=1)
    return str(found[0].info.run_id) if found else None


def find_running(client: MlflowClient, experiment: str, run_dir: str) -> str | None:
    """Return the id of the run in a directory, for a process that knows only the directory; None if there is none.

    Only running runs count, the newest one first: the directory may have been deleted and used again.
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
    """Create a run. Returns its id."""
    run = client.create_run(experiment_id, start_time=round(began * 1000), tags=dict(tags), run_name=name)
    return str(run.info.run_id)


def tags_of(run: Run, chosen: Mapping[str, Any]) -> dict[str, str]:
    """Return a new run's tags: those of the run, under MLflow's names where it has them, and the user's."""
    given = dict(run.attempts[0].tags)
    script = shlex.split(given.get("command", ""))[1:2]
    ours = {"mlflow.source.git.commit": given.pop("git_commit", None), "mlflow.user": given.pop("user", None)}
    if script:
        ours |= {"mlflow.source.name": script[0], "mlflow.source.type": "LOCAL"}
    if run.sweep is not None:
        given |= {"sweep": run.sweep.name, "job": str(run.sweep.job)}
    given |= {name: value for name, value in ours.items() if value is not None}
    return {**_as_tags(given), **_as_tags(chosen), UID: run.uid}  # last, so that it cannot be overridden


def parent_tags(sweep: Sweep, chosen: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a sweep's parent run."""
    given = {"sweep": sweep.name, "sweep_dir": str(sweep.folder)}
    return {**_as_tags(given), **_as_tags(chosen), UID: sweep.uid}


def _as_tags(tags: Mapping[str, Any]) -> dict[str, str]:
    return {clean(str(name)): tag_value(str(value)) for name, value in tags.items()}


def drop_tags(client: MlflowClient, run_id: str, names: Sequence[str]) -> None:
    """Delete those of the tags that the run has."""
    there = client.get_run(run_id).data.tags
    for name in names:
        if name in there:
            client.delete_tag(run_id, name)


def without_secrets(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a hook's options with secrets masked, except in the address, which is needed as it is."""
    texts = {name: mask_text(value) if isinstance(value, str) else value for name, value in options.items()}
    tags = {mask_text(str(name)): value for name, value in (masked(options.get("tags")) or {}).items()}
    return {**texts, "tags": tags, **{name: options[name] for name in _ADDRESS if name in options}}


def experiment_name(options: Mapping[str, Any], default: str) -> str:
    """Return the experiment: that of the options, of MLflow's environment variable, or else `default`."""
    return mask_text(options.get("experiment") or os.environ.get(EXPERIMENT) or default)


def tag_value(text: str) -> str:
    """Shorten a text to MLflow's limit for tags."""
    return text if len(text) <= _LONGEST_TAG else f"{text[: _LONGEST_TAG - 1]}…"


def log_points(client: MlflowClient, run_id: str, metrics: Sequence[Metric]) -> None:
    """Log points of metrics in batches that a server accepts. Points that exist already are not duplicated."""
    from mlflow.exceptions import MlflowException

    for start in range(0, len(metrics), _METRICS_AT_ONCE):
        batch = metrics[start : start + _METRICS_AT_ONCE]
        try:
            client.log_batch(run_id, metrics=batch)
        except MlflowException as error:
            if "IntegrityError" not in str(error):
                raise
            # Older versions (3.13) do not recognize a NaN that they have already.
            there = {
                (key, point.step, point.timestamp, as_kept(point.value))
                for key in {metric.key for metric in batch}
                for point in client.get_metric_history(run_id, key)
            }
            new = [one for one in batch if (one.key, one.step, one.timestamp, as_kept(one.value)) not in there]
            client.log_batch(run_id, metrics=new)


def as_kept(value: float) -> float | str:
    """Return a value as a database returns it, without infinity, and in a form that compares equal to itself."""
    if math.isnan(value):
        return "nan"
    return max(min(value, sys.float_info.max), -sys.float_info.max)


def log_params(client: MlflowClient, run_id: str, params: Mapping[str, Any], *, prefix: str = "") -> None:
    """Log parameters, a hundred at a time. Of a value that is too long, only the length is logged."""
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
    """Log one parameter of a refused batch. Older servers accept only shorter values."""
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
    log.warning("parameter %s is not sent: %s", param.key, problem)


def _text(value: Any) -> str:
    """Return a value as it is written in the config."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _marker(text: str) -> str:
    return f"({len(text)} characters: see config.yaml)"
