"""Experiments and runs at MLflow: finds or creates them, with valid names, parameters, tags and metrics."""

from __future__ import annotations

import hashlib
import math
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from hydraloop.files.atomic import file_name
from hydraloop.files.record_log import FILENAME, Record, read_all
from hydraloop.files.run_directory import SWEEP_FILE
from hydraloop.tracking import run_description
from hydraloop.tracking.cursor import lock_of
from hydraloop.tracking.mlflow.address import sqlite_path
from hydraloop.tracking.tracker import Run, Sweep

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Metric

UID = "hydraloop.run"
"""Tag by which a run is found again."""
_TARGET = "_target_"
_TRACKERS = ("MLflowLoggerHook", "TensorBoardLoggerHook", "WandbLoggerHook")
_LONGEST_NAME, _LONGEST_TAG = 250, 8000
"""Most characters of a name and of a tag. MLflow shortens values itself, except for the tags of a new run."""
_BAD = r"[^\w.\- :/]"


@lru_cache(maxsize=4096)
def clean(name: str) -> str:
    """Return a name of a metric, parameter or tag that MLflow accepts.

    MLflow refuses most signs, and parts such as `..` that would change a path. They become `_`. A changed name gets a
    digest, so that different names stay different.
    """
    parts = ["_" if part in ("", ".", "..") else re.sub(_BAD, "_", part) for part in name.split("/")]
    text = "/".join(parts)
    if text != name:
        text += f"_{hashlib.sha256(name.encode(errors='replace')).hexdigest()[:6]}"
    return file_name(text, _BAD, longest=_LONGEST_NAME)


def experiment_of(client: MlflowClient, name: str, uri: str) -> str:
    """Return the id of an experiment, which is created if it does not exist."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        return str(found.experiment_id)
    path, location = sqlite_path(uri), None
    if path is not None:
        # Next to the database. MLflow's default is the working directory of the process that creates it.
        files = path.parent / "mlruns" / clean(name).replace("/", "_")
        location = files.as_uri() if "%" in str(files) else str(files)  # MLflow decodes a path
    return str(client.create_experiment(name, artifact_location=location))


def find(client: MlflowClient, experiment_id: str, uid: str) -> str | None:
    """Return the run with a tag `hydraloop.run`, which an earlier process may have created before it was killed."""
    found = client.search_runs([experiment_id], f"tags.`{UID}` = '{uid}'", max_results=1)
    return str(found[0].info.run_id) if found else None


def ensure(client: MlflowClient, experiment_id: str, uid: str, name: str, tags: Mapping[str, Any], began: float) -> str:
    """Return the id of the run with a tag `hydraloop.run`, which is created if it does not exist."""
    if (run_id := find(client, experiment_id, uid)) is not None:
        return run_id
    given = {clean(str(key)): str(value)[:_LONGEST_TAG] for key, value in tags.items()}
    run = client.create_run(experiment_id, start_time=round(began * 1000), tags={**given, UID: uid}, run_name=name)
    return str(run.info.run_id)


def ensure_parent(client: MlflowClient, sweep: Sweep, experiment_id: str, tags: Mapping[str, Any]) -> str:
    """Return the id of the run whose children are the jobs of a sweep, which is created if it does not exist.

    It has the user's tags, and is finished from the beginning: only the jobs have a status and metrics.
    """
    given = {"sweep": sweep.name, "sweep_dir": sweep.folder, **tags}
    # Several jobs share a sender, and that of a killed controller still sends when the next one starts.
    with lock_of(sweep.folder, "mlflow") if (sweep.folder / SWEEP_FILE).is_file() else nullcontext():
        run_id = find(client, experiment_id, sweep.uid)
        if run_id is None:
            run_id = ensure(client, experiment_id, sweep.uid, sweep.name.rpartition("/")[2], given, sweep.began)
            client.set_terminated(run_id)
    return run_id


def tags_of(run: Run, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a new run's tags: those of the run, under MLflow's names where it has them, and the user's."""
    tags: dict[str, Any] = dict(run.attempts[0].tags)
    names = {"git_commit": "mlflow.source.git.commit", "user": "mlflow.user"}
    tags |= {name: tags.pop(key) for key, name in names.items() if key in tags}
    if run.sweep is not None:
        tags |= {"sweep": run.sweep.name, "job": run.sweep.job}
    return tags | (options.get("tags") or {})


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
        if value in (None, "{}", "[]") or key.startswith(trackers):
            continue
        if not name.startswith("_"):
            params[key] = str(value).lower() if isinstance(value, bool) else str(value)  # as in the config
        elif name == _TARGET and not node.startswith(("hooks.", "default_hooks.")):
            params[node or name] = str(value).rpartition(".")[2]
    return params


def log_params(client: MlflowClient, run_id: str, params: Mapping[str, str]) -> None:
    """Log parameters."""
    from mlflow.entities import Param

    client.log_batch(run_id, params=[Param(clean(key), text) for key, text in params.items()])


class Points:
    """Sends the points of one run. MLflow cannot delete any.

    A call may be repeated: MLflow stores points of equal name, value, time and step once. If a resumed run repeats
    iterations, equal values are not sent again. Others are, with their later time, and become the latest.

    Args:
        memory: the tracker's memory. `again_from`: the iteration from which points of an earlier attempt may exist.
    """

    def __init__(self, client: MlflowClient, run_id: str, memory: Mapping[str, Any]) -> None:
        self._client, self._run_id, self._memory = client, run_id, memory
        self._there: dict[str, dict[int, float | str]] = {}
        """By metric and step, the newest value at MLflow of points that may be repeated."""

    def send(self, records: Sequence[Record]) -> None:
        """Send the points whose value differs from the newest one of their step."""
        try:
            self._client.log_batch(self._run_id, list(self._new(records)))
        except Exception:
            self._there.clear()  # it is unknown which points have arrived
            raise

    def _new(self, records: Sequence[Record]) -> Iterator[Metric]:
        from mlflow.entities import Metric

        again = self._memory.get("again_from", math.inf)
        for record in records:
            time_ms, step = round(record.timestamp * 1000), record.iteration
            for name, value in record.metrics.items():
                key = clean(name)
                if step >= again:
                    there, kept = self._before(key), _as_kept(value)
                    if there.get(step) == kept:
                        continue
                    there[step] = kept
                yield Metric(key, value, time_ms, step)

    def _before(self, key: str) -> dict[int, float | str]:
        if key not in self._there:
            points = sorted(self._client.get_metric_history(self._run_id, key), key=lambda point: point.timestamp)
            again = self._memory["again_from"]
            self._there[key] = {point.step: _as_kept(point.value) for point in points if point.step >= again}
        return self._there[key]


def send_final_values(client: MlflowClient, run_id: str, run: Run, ended: int) -> None:
    """Send the best value as a metric such as `best/accuracy`, and make the run's last values the latest at MLflow.

    MLflow shows the value of the highest step. If an earlier attempt, or a test after more iterations, had reached a
    higher step, the last value is sent once more, at that step.

    Args:
        ended: when the run ended, in milliseconds.
    """
    from mlflow.entities import Metric

    last: dict[str, float] = {}
    for record in read_all(run.run_dir / FILENAME):
        last |= record.metrics
    best = run_description.result_of(run.run_dir, run.attempt).get("best")
    if best:
        name, value = f"best/{best['metric']}", float(best["value"])
        client.log_batch(run_id, [Metric(clean(name), value, ended, best["iteration"])])
        last[name] = value
    shown = client.get_run(run_id).data.metrics
    late = []
    for key, value in ((clean(name), value) for name, value in last.items()):
        if key in shown and _as_kept(shown[key]) != _as_kept(value):
            step = max(point.step for point in client.get_metric_history(run_id, key))
            late.append(Metric(key, value, ended, step))
    client.log_batch(run_id, late)


def _as_kept(value: float) -> float | str:
    """Return a value as a database returns it, without infinity, and in a form that compares equal to itself."""
    return "nan" if math.isnan(value) else max(min(value, sys.float_info.max), -sys.float_info.max)
