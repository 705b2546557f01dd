"""Experiments and runs at MLflow: finds or creates them, with valid names, parameters and tags."""

from __future__ import annotations

import hashlib
import re
import shlex
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hydraloop.tracking.mlflow.address import shown, sqlite_path
from hydraloop.tracking.tracker import Run, UnusableError

if TYPE_CHECKING:
    from mlflow import MlflowClient

UID = "hydraloop.run"
"""Tag by which a run is found again."""
NOTE = "mlflow.note.content"
"""Tag with the description of a run."""
_PLUMBING = frozenset({"_partial_", "_convert_", "_recursive_"})
_TARGET = "_target_"
_TRACKERS = ("MLflowLoggerHook", "TensorBoardLoggerHook", "WandbLoggerHook")
_PARAMS_AT_ONCE = 100
"""Most that a server accepts in one call."""
_LONGEST_NAME, _LONGEST_TAG = 250, 8000
"""Most characters of a name and of a tag. MLflow shortens values itself, except for the tags of a new run."""
_BAD = re.compile(r"[^\w.\- :/]")


@lru_cache(maxsize=4096)
def clean(name: str) -> str:
    """Return a name of a metric, parameter or tag that MLflow accepts.

    MLflow refuses most signs, and parts such as `..` that would change a path. They become `_`. A changed name gets a
    digest, so that different names stay different.
    """
    parts = ["_" if part in ("", ".", "..") else _BAD.sub("_", part) for part in name.split("/")]
    text = "/".join(parts)
    if text == name and len(name) <= _LONGEST_NAME:
        return name
    digest = hashlib.sha256(name.encode(errors="replace")).hexdigest()[:6]
    return f"{text[: _LONGEST_NAME - 7].rstrip('/')}_{digest}"


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
        command = f"MLFLOW_TRACKING_URI={shlex.quote(shown(uri))} mlflow experiments restore -x {found.experiment_id}"
        raise UnusableError(
            f"experiment {name!r} was deleted there; restore it with `{command}`, or use another one: "
            "hooks.mlflow.experiment=…"
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
        chosen[NOTE] = options["description"]
    given = dict(run.attempts[0].tags)
    script = shlex.split(given.get("command", ""))[1:2]
    ours = {"mlflow.source.git.commit": given.pop("git_commit", None), "mlflow.user": given.pop("user", None)}
    if script:
        ours |= {"mlflow.source.name": script[0], "mlflow.source.type": "LOCAL"}
    if run.sweep is not None:
        given |= {"sweep": run.sweep.name, "job": str(run.sweep.job)}
    given |= {name: value for name, value in ours.items() if value is not None}
    return tags_with(run.uid, given, chosen)


def tags_with(uid: str, given: Mapping[str, Any], chosen: Mapping[str, Any]) -> dict[str, str]:
    """Return the tags of a new run, the user's among them. None of them overrides the one by which it is found."""
    tags = {clean(str(name)): str(value)[:_LONGEST_TAG] for name, value in {**given, **chosen}.items()}
    return {**tags, UID: uid}


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
            params[key] = str(value).lower() if isinstance(value, bool) else str(value)  # as in the config
        elif not node.startswith(("hooks.", "default_hooks.")):
            params[node or name] = str(value).rpartition(".")[2]
    return params


def changed_params(config: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, str]:
    """Return the parameters of a resumed run that differ from those of the attempt before; removed ones are `null`."""
    new, old = params_of(config), params_of(before)
    return {key: value for key, value in (dict.fromkeys(old, "null") | new).items() if value != old.get(key)}


def log_params(client: MlflowClient, run_id: str, params: Mapping[str, str]) -> None:
    """Log parameters, a hundred at a time."""
    from mlflow.entities import Param

    all_of_them = [Param(clean(key), text) for key, text in params.items()]
    for start in range(0, len(all_of_them), _PARAMS_AT_ONCE):
        client.log_batch(run_id, params=all_of_them[start : start + _PARAMS_AT_ONCE])
