"""Experiments and runs at MLflow: finds or creates them, and keeps parameters and tags within MLflow's limits."""

from __future__ import annotations

import logging
import math
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
_NOTE = "mlflow.note.content"
"""Tag with the description of a run."""
_PLUMBING = frozenset({"_partial_", "_convert_", "_recursive_"})
_TARGET = "_target_"
_TRACKERS = ("MLflowLoggerHook", "TensorBoardLoggerHook", "WandbLoggerHook")
_ADDRESS = ("tracking_uri", "environment", "folder")
_PARAMS_AT_ONCE, _METRICS_AT_ONCE = 100, 1000
"""Most that a server accepts in one call."""
_LONGEST_TAG = 5000
"""Most characters of a tag that databases of all kinds accept."""


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


def create(client: MlflowClient, experiment_id: str, name: str, tags: Mapping[str, str], began: float) -> str:
    """Create a run. Returns its id."""
    run = client.create_run(experiment_id, start_time=round(began * 1000), tags=dict(tags), run_name=name)
    return str(run.info.run_id)


def tags_of(run: Run, options: Mapping[str, Any]) -> dict[str, str]:
    """Return a new run's tags: those of the run, under MLflow's names where it has them, and the user's."""
    chosen = dict(options.get("tags") or {})
    if options.get("description"):
        chosen[_NOTE] = options["description"]
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


def params_of(config: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a flattened config that distinguish runs; `config.yaml` has them all.

    Nulls, empty lists and the options of trackers are left out. `optimizer._target_=torch.optim.AdamW` becomes
    `optimizer=AdamW`, except for hooks, which have the name of their class.
    """
    targets = {key.removesuffix(f".{_TARGET}"): value for key, value in config.items() if key.endswith(f".{_TARGET}")}
    trackers = tuple(f"{key}." for key, value in targets.items() if str(value).rpartition(".")[2] in _TRACKERS)
    params = {}
    for key, value in config.items():
        node, _, name = key.rpartition(".")
        if value in (None, "{}", "[]") or name in _PLUMBING or key.startswith(trackers):
            continue
        if name != _TARGET:
            params[key] = _text(value)
        elif not node.startswith(("hooks.", "default_hooks.")):
            params[node or name] = str(value).rpartition(".")[2]
    return params


def changed_params(config: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters of a resumed run that differ from those of the attempt before; removed ones are `null`."""
    new, old = params_of(config), params_of(before)
    return {key: value for key, value in (dict.fromkeys(old, "null") | new).items() if value != old.get(key)}


def log_params(client: MlflowClient, run_id: str, params: Mapping[str, str], *, prefix: str = "") -> None:
    """Log parameters, a hundred at a time. Of a value that is too long, only the length is logged."""
    from mlflow.entities import Param
    from mlflow.exceptions import MlflowException
    from mlflow.utils.validation import MAX_PARAM_VAL_LENGTH

    names = Names({})
    names.new(prefix + key for key in params)
    all_of_them = [
        Param(names.of(prefix + key), text if len(text) <= MAX_PARAM_VAL_LENGTH else _marker(text))
        for key, text in params.items()
    ]
    for start in range(0, len(all_of_them), _PARAMS_AT_ONCE):
        try:
            client.log_batch(run_id, params=all_of_them[start : start + _PARAMS_AT_ONCE])
        except MlflowException as error:
            if error.error_code != "INVALID_PARAMETER_VALUE":
                raise
            log.warning("some parameters are not sent: %s", error)


def _text(value: Any) -> str:
    """Return a value as it is written in the config."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def _marker(text: str) -> str:
    return f"({len(text)} characters: see config.yaml)"
