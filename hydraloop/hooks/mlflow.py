"""MLflowLoggerHook: sends the run to MLflow, to a server or a local database."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hydraloop.engine.hook import Priority
from hydraloop.errors import UserError
from hydraloop.hooks.shared.model_export import ModelExport
from hydraloop.hooks.shared.option_checks import check_above_zero
from hydraloop.safety.secrets import mask_text
from hydraloop.tracking.checkpoints import check_choice
from hydraloop.tracking.describe_engine import experiment_name
from hydraloop.tracking.hook import TrackerHook
from hydraloop.tracking.kinds import MLFLOW
from hydraloop.tracking.mlflow.nodes import NodeProcess, warn_of_file

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


class MLflowLoggerHook(TrackerHook):
    """Sends the run to MLflow; without any setting, `mlflow ui` in the same folder shows it.

    A separate process, the follower, sends: every number of every record as a metric, `train/loss` or `val/accuracy`,
    over the iteration; the flattened config as parameters and as `config.yaml`; git commit, command line, host and
    world size as tags; CPU, memory, disk, network and GPUs of the machine as system metrics; the pictures of
    `visualization`; `result.json` and the run's status. Jobs of a sweep are children of one run. A resumed run
    continues the same MLflow run: changed parameters are `resume_1/…`, and repeated iterations show the values of the
    resumed run, even if it ends earlier. Secrets in tags and names are masked.

    With `log_model`, the best model (else the last, with averaged weights if there are any) is exported by torch.export
    and logged with a signature and an example, to be loaded by `mlflow.pytorch.load_model` without its code. The data
    sets are inputs of the run.

    Runs are stored in `mlflow.db` (SQLite) in the working directory and files in `mlruns` next to it, or on a server:
    `MLFLOW_TRACKING_URI` or `tracking_uri`.

    Priority VERY_LOW: other hooks' records of an iteration come first. Runs on rank 0 only, except for
    `system_metrics_nodes`. No host sync, and nothing in an iteration. No state. Options: `MLflowLoggerHookConf`.

    Raises:
        UserError: `system_metrics_interval`, `checkpoints` or `flush_timeout` is out of range.
    """

    kind = MLFLOW
    library = "mlflow"
    priority = Priority.VERY_LOW
    runs_after = ("logger",)
    rank_zero_only = False

    def __init__(
        self,
        *,
        tracking_uri: str | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        tags: Mapping[str, Any] = MappingProxyType({}),
        system_metrics: bool = True,
        system_metrics_interval: float = 10.0,
        system_metrics_nodes: bool = False,
        checkpoints: str | None = None,
        pictures: bool = True,
        log_code: bool = False,
        log_model: bool = False,
        registered_model_name: str | None = None,
        flush_timeout: float = 10.0,
        background: bool = False,
    ) -> None:
        check_above_zero(system_metrics_interval=system_metrics_interval)
        check_choice(checkpoints)
        if registered_model_name is not None and not log_model:
            raise UserError(
                "only an exported model can be registered", key="registered_model_name", remedy="Set log_model=true."
            )
        self._export = ModelExport() if log_model else None
        self.idle_points = () if log_model else ("after_train_iter",)
        super().__init__(
            flush_timeout=flush_timeout,
            background=background,
            options={
                "tracking_uri": tracking_uri,
                "experiment": experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME"),
                "run_name": run_name,
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
        self._all_nodes = system_metrics and system_metrics_nodes
        self._node: NodeProcess | None = None

    def before_run(self, engine: Engine) -> None:
        """Start the follower; with `system_metrics_nodes`, on other machines the process that logs their load."""
        ranks = engine.distributed
        if ranks.is_main:
            super().before_run(engine)
            if self._all_nodes:
                warn_of_file(self.name, self._options, ranks)
        elif self._all_nodes and ranks.local_rank == 0 and ranks.node_rank > 0:
            experiment = mask_text(self._options["experiment"] or experiment_name(engine))
            self._node = NodeProcess(self.name, engine.run_dir, experiment, self._options, ranks.node_rank)
            self._node.start()

    def before_train(self, engine: Engine) -> None:
        if engine.distributed.is_main:
            super().before_train(engine)

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Keep the first batch, as the example of the exported model."""
        if self._export is not None:
            self._export.see(batch)

    def after_run(self, engine: Engine) -> None:
        """Send the rest in bounded time, or stop logging this machine's load."""
        if engine.distributed.is_main:
            super().after_run(engine)
        elif self._node is not None:
            self._node.stop()

    def _finish(self, engine: Engine) -> None:
        if self._export is not None and engine.error is None and engine.result is not None:
            self._export.write(engine, f"{self.key}.log_model")
            self._export = None
        super()._finish(engine)
