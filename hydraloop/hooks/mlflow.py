"""MLflowLoggerHook: sends the run to MLflow, to a server or a local database."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Priority
from hydraloop.errors import UserError
from hydraloop.hooks.shared.model_export import ModelExport
from hydraloop.option_checks import CHECKPOINTS, check_above, check_choice
from hydraloop.tracking.cursor import Cursor
from hydraloop.tracking.hook import TrackerHook
from hydraloop.tracking.mlflow import address
from hydraloop.tracking.mlflow.tracker import STATUS
from hydraloop.tracking.tracker import MLFLOW

_RUN_ID, _URI = "MLFLOW_RUN_ID", "MLFLOW_TRACKING_URI"
_NO_WAITING = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0", "MLFLOW_HTTP_REQUEST_TIMEOUT": "5"}
"""By default, MLflow tries for minutes."""


class MLflowLoggerHook(TrackerHook):
    """Sends the run to MLflow; without any setting, `mlflow ui` in the same folder shows it.

    A separate process, the sender, sends: every number of every record as a metric, `train/loss` or `val/accuracy`,
    over the iteration; the flattened config as parameters (without nulls and tracker options) and as `config.yaml`; git
    commit, command line, host and world size as tags; CPU, memory, disk, network and GPUs of the machine as system
    metrics; the pictures and other objects of records; `result.json` and the run's status. Jobs of a sweep are children
    of one run. A resumed run continues the same MLflow run: changed parameters are `resume_1/…`, and repeated
    iterations show the values of the resumed run, even if it ends earlier. Secrets in tags and names are masked.

    With `log_model`, the best model (else the last, with averaged weights if there are any) is exported by torch.export
    and logged with a signature and an example, to be loaded by `mlflow.pytorch.load_model` without its code. The data
    sets are inputs of the run.

    Runs are stored in `mlflow.db` (SQLite) in the working directory and files in `mlruns` next to it, or on a server:
    `MLFLOW_TRACKING_URI` or `tracking_uri`.

    With `run_id`, code in the training process uses the same run: `mlflow.log_metric`, `mlflow.autolog()`.

    Priority VERY_LOW: other hooks' records of an iteration come first. Runs on rank 0 only. No host sync, and nothing
    in an iteration. No state. Options: `MLflowLoggerHookConf`.

    Raises:
        UserError: `system_metrics_interval`, `checkpoints` or `flush_timeout` is out of range, or
            `registered_model_name` is not a name for a model, or set without `log_model`.
    """

    kind = MLFLOW
    library = "mlflow"
    shares_sender = True
    priority = Priority.VERY_LOW
    runs_after = ("logger",)

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        description: str | None = None,
        tags: Mapping[str, Any] = MappingProxyType({}),
        system_metrics: bool = True,
        system_metrics_interval: float = 10.0,
        checkpoints: str | None = None,
        pictures: bool = True,
        log_code: bool = False,
        log_model: bool = False,
        registered_model_name: str | None = None,
        flush_timeout: float = 10.0,
        background: bool = False,
        interval: int = 1,
    ) -> None:
        check_above(0, system_metrics_interval=system_metrics_interval)
        check_choice(CHECKPOINTS, checkpoints=checkpoints)
        if registered_model_name is not None and not log_model:
            raise UserError(
                "only an exported model can be registered", key="registered_model_name", remedy="Set log_model=true."
            )
        if registered_model_name is not None and (
            not registered_model_name.strip(" .") or set("/:") & set(registered_model_name)
        ):
            raise UserError(
                f"MLflow does not accept the name {registered_model_name!r}",
                key="registered_model_name",
                remedy="Use at least one letter, and neither / nor :.",
            )
        self._export = ModelExport() if log_model else None
        self.idle_points = () if log_model else ("after_train_iter",)
        super().__init__(
            flush_timeout=flush_timeout,
            background=background,
            interval=interval,
            options={
                "tracking_uri": tracking_uri,
                "experiment": experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME"),
                "run_name": run_name,
                "description": description,
                "tags": {str(name): str(value) for name, value in tags.items()},
                "system_metrics": system_metrics,
                "system_metrics_interval": system_metrics_interval,
                "checkpoints": checkpoints,
                "pictures": pictures,
                "log_code": log_code,
                "log_model": log_model,
                "registered_model_name": registered_model_name,
                # The default address depends on these; `sync.py` may run later and elsewhere.
                "folder": str(Path.cwd()),
                "environment": os.environ.get("MLFLOW_TRACKING_URI"),
            },
        )
        self._run_id: str | None = None
        self._patience = flush_timeout
        self._before: dict[str, str | None] = {}
        """Environment variables before `run_id` was read."""

    @property
    def run_id(self) -> str | None:
        """The id of the run at MLflow. The first read waits for the service to open the run, at most `flush_timeout`.

        From then on until the run ends, `MLFLOW_RUN_ID` and `MLFLOW_TRACKING_URI` are set, so that `mlflow.log_metric`
        and `mlflow.autolog()` in this process write to the same run.

        Read it after `before_train`. None while the service has not opened the run, and on ranks other than 0.
        """
        link = self._link
        if self._run_id is None and link is not None and self._begun:
            opened = link.until_opened(self._patience)
            self._patience = 0.0
            cursor = Cursor.load(link.run_dir, self.name) if opened else None
            if cursor is not None and "run_id" in cursor.memory:
                self._run_id = str(cursor.memory["run_id"])
                uri = address.address_of(self._options, cursor.memory)
                self._before = {name: os.environ.get(name) for name in (_RUN_ID, _URI, *_NO_WAITING)}
                os.environ.update({_RUN_ID: self._run_id, _URI: uri})
        return self._run_id

    def before_run(self, engine: Engine) -> None:
        self.check_only_one(engine, "use the same run id")
        super().before_run(engine)

    def on_log(self, engine: Engine, record: Mapping[str, Any]) -> None:
        super().on_log(engine, record)
        # MLflow removes the variable when it opens the run, so autolog would open another one the second time.
        if self._before and _RUN_ID not in os.environ and _active_run() is None:
            os.environ[_RUN_ID] = str(self._run_id)

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Keep the first batch, as the example of the exported model."""
        if self._export is not None:
            self._export.see(batch)

    def after_run(self, engine: Engine) -> None:
        """Send the rest in bounded time, then end the run in this process, if it was opened here."""
        try:
            super().after_run(engine)
            self._end_active_run(engine)
        finally:
            for name, value in self._before.items():
                os.environ.pop(name, None)
                if value is not None:
                    os.environ[name] = value
            self._before, self._run_id, self._patience = {}, None, self._flush_timeout

    def _end_active_run(self, engine: Engine) -> None:
        """End the run that MLflow has opened in this process, while the environment still has its address."""
        active = _active_run() if self._before else None
        if active is not None and active.info.run_id == self._run_id:
            os.environ |= _NO_WAITING
            with suppress(Exception):  # the sender sends the status, too
                sys.modules["mlflow"].end_run(
                    STATUS["failed" if engine.outcome.result is None else engine.outcome.result.status]
                )

    def _finish(self, engine: Engine) -> None:
        if self._export is not None and engine.error is None and engine.outcome.result is not None:
            self._export.write(engine, f"{self.key}.log_model")
            self._export = None
        super()._finish(engine)


def _active_run() -> Any:
    """Return the run that MLflow has opened in this process; None without one."""
    mlflow = sys.modules.get("mlflow")
    return None if mlflow is None else mlflow.active_run()
