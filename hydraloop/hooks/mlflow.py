"""MLflowLoggerHook: the run at MLflow, at a server or in a database of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydraloop.engine.hook import Priority
from hydraloop.errors import UserError, suggestion
from hydraloop.tracking.hook import TrackerHook

_CHECKPOINTS = ("best", "last", "all")


class MLflowLoggerHook(TrackerHook):
    """Sends the run to MLflow: `mlflow ui` in the same folder shows it, with nothing to configure.

    A process of its own sends every number of every record as a metric, `train/loss` or `val/accuracy`, over the
    iteration; the config, flattened, as parameters and as `config.yaml`; the git commit, command line, host and world
    size as tags; the machine's CPU, memory, disk, network and GPUs as system metrics; the pictures of `visualization`;
    `result.json`, and the run's status. Jobs of a sweep are the children of one run. A run that is resumed goes on as
    the same run at MLflow: parameters that changed are `resume_1/…`, and of what it does again the latest values are
    the resumed run's.

    Runs are kept in `mlflow.db` (SQLite) in the working directory, files in `mlruns` beside it, or at a server:
    `MLFLOW_TRACKING_URI` or `tracking_uri`.

    Mount points: before_run, before_train, on_log, after_run. Priority VERY_LOW: other hooks' records of an iteration
    stand in front. Rank 0 only. No host sync, and nothing is done in an iteration. No state. Errors warn: no training
    fails for its tracker.

    Args:
        tracking_uri: `sqlite:///…`, `http://…` or another address that MLflow knows; None: `MLFLOW_TRACKING_URI`, else
            `sqlite:///mlflow.db`.
        experiment: its name; None: `experiment_name`.
        run_name: None: the job's overrides in a sweep, else the run directory's date and time.
        tags: more tags of the run, by name.
        system_metrics: whether the machine's load is logged.
        system_metrics_interval: seconds between two of its points, above 0.
        checkpoints: checkpoint files stored as artifacts: `all`, as they appear; `best` or `last`, when the run ends;
            None: none.
        pictures: whether pictures are stored as artifacts.
        flush_timeout: seconds that sending the rest may take after the run's end, at least 0.

    Raises:
        UserError: an interval of 0 or below; a choice of checkpoints that is none; a negative `flush_timeout`.
    """

    kind = "mlflow"
    priority = Priority.VERY_LOW
    runs_after = ("logger",)

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
        system_metrics: bool = True,
        system_metrics_interval: float = 10.0,
        checkpoints: str | None = None,
        pictures: bool = True,
        flush_timeout: float = 10.0,
    ) -> None:
        if not system_metrics_interval > 0:
            raise UserError(
                f"{system_metrics_interval} is not above 0",
                key="system_metrics_interval",
                remedy="Use seconds, or system_metrics=false.",
            )
        if checkpoints is not None and checkpoints not in _CHECKPOINTS:
            raise UserError(
                f"there is no choice {checkpoints!r}", key="checkpoints", remedy=suggestion(checkpoints, _CHECKPOINTS)
            )
        super().__init__(
            flush_timeout=flush_timeout,
            options={
                "tracking_uri": tracking_uri,
                "experiment": experiment,
                "run_name": run_name,
                "tags": {str(name): str(value) for name, value in (tags or {}).items()},
                "system_metrics": system_metrics,
                "system_metrics_interval": system_metrics_interval,
                "checkpoints": checkpoints,
                "pictures": pictures,
                "folder": str(Path.cwd()),
            },
        )
