"""MLflowLoggerHook: sends the run to MLflow, to a server or a local database."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Priority
from hydraloop.schemas.option_checks import CHECKPOINTS, check_choice
from hydraloop.tracking.hook import TrackerHook
from hydraloop.tracking.tracker import MLFLOW


class MLflowLoggerHook(TrackerHook):
    """Sends the run to MLflow; without any setting, `mlflow ui` in the same folder shows it.

    A separate process, the sender, sends: every number of every record as a metric, `train/loss` or `val/accuracy`,
    over the iteration; the flattened config as parameters (without nulls and tracker options) and as `config.yaml`; git
    commit, command line, host and world size as tags; CPU, memory, disk, network and GPUs of the machine as system
    metrics; the pictures and other objects of records; `result.json` and the run's status.
    Jobs of a sweep are children of one run. A resumed run continues the same MLflow run: changed parameters are
    `resume_1/…`, and repeated iterations show the values of the resumed run, even if it ends earlier. Secrets in tags
    and names are masked.

    Runs are stored in `mlflow.db` (SQLite) in the working directory and files in `mlruns` next to it, or on a server:
    `MLFLOW_TRACKING_URI` or `tracking_uri`.

    Priority VERY_LOW: other hooks' records of an iteration come first. Runs on rank 0 only. No host sync, and nothing
    in an iteration. No state. Options: `MLflowLoggerHookConf`.

    Raises:
        UserError: `checkpoints` or `flush_timeout` is out of range.
    """

    kind = MLFLOW
    library = "mlflow"
    priority = Priority.VERY_LOW
    runs_after = ("logger",)

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] = MappingProxyType({}),
        system_metrics: bool = True,
        checkpoints: str | None = None,
        log_code: bool = False,
        flush_timeout: float = 10.0,
        interval: int = 1,
    ) -> None:
        check_choice(CHECKPOINTS, checkpoints=checkpoints)
        super().__init__(
            flush_timeout=flush_timeout,
            interval=interval,
            options={
                "tracking_uri": tracking_uri,
                "experiment": os.environ.get("MLFLOW_EXPERIMENT_NAME"),
                "tags": {str(name): str(value) for name, value in tags.items()},
                "system_metrics": system_metrics,
                "checkpoints": checkpoints,
                "log_code": log_code,
                # The default address depends on these; `sync` may run later and elsewhere.
                "folder": str(Path.cwd()),
                "environment": os.environ.get("MLFLOW_TRACKING_URI"),
            },
        )

    def before_run(self, engine: Engine) -> None:
        self.check_only_one(engine, "use the same run id")
        super().before_run(engine)
