"""MLflowLoggerHook: the run at MLflow, at a server or in a database of the user's own."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from hydraloop.engine.hook import Priority
from hydraloop.errors import UserError
from hydraloop.safety.secrets import mask_text
from hydraloop.tracking.choices import check_checkpoints
from hydraloop.tracking.describing import experiment_name
from hydraloop.tracking.hook import TrackerHook
from hydraloop.tracking.mlflow.nodes import NodeProcess, warn_of_file

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


class MLflowLoggerHook(TrackerHook):
    """Sends the run to MLflow: `mlflow ui` in the same folder shows it, with nothing to configure.

    A process of its own sends every number of every record as a metric, `train/loss` or `val/accuracy`, over the
    iteration; the config, flattened, as parameters and as `config.yaml`; the git commit, command line, host and world
    size as tags; the machine's CPU, memory, disk, network and GPUs as system metrics; the pictures of `visualization`;
    `result.json`, and the run's status. Jobs of a sweep are the children of one run. A run that is resumed goes on as
    the same run at MLflow: parameters that changed are `resume_1/…`, and of what it does again the latest values are
    the resumed run's, even where it ends earlier. Secrets in tags and names are masked.

    Runs are kept in `mlflow.db` (SQLite) in the working directory, files in `mlruns` beside it, or at a server:
    `MLFLOW_TRACKING_URI` or `tracking_uri`.

    Mount points: before_run, before_train, on_log, after_run. Priority VERY_LOW: other hooks' records of an iteration
    stand in front. Rank 0 only, but for `system_metrics_nodes`. No host sync, and nothing is done in an iteration. No
    state. Errors warn: no training fails for its tracker.

    Args:
        tracking_uri: `sqlite:///…`, `http://…` or another address that MLflow knows; None: `MLFLOW_TRACKING_URI`, else
            `sqlite:///mlflow.db`.
        experiment: its name; None: `MLFLOW_EXPERIMENT_NAME`, else `experiment_name`.
        run_name: None: the job's overrides in a sweep, else the run directory's date and time.
        tags: more tags of the run, by name.
        system_metrics: whether the machine's load is logged.
        system_metrics_interval: seconds between two of its points, above 0.
        system_metrics_nodes: whether that of the machines without rank 0 is logged, too, as `system/node_1/…`; not
            without `system_metrics`.
        checkpoints: checkpoint files stored as artifacts: `all`, as they appear; `best` or `last`, when the run ends;
            None: none.
        pictures: whether pictures are stored as artifacts.
        log_code: whether `code.patch`, the uncommitted changes of the code, is stored as an artifact.
        flush_timeout: seconds that sending the rest may take after the run's end, from 0 to 86,400.

    Raises:
        UserError: an interval of 0 or below; a choice of checkpoints that is none; a `flush_timeout` out of its range.
    """

    kind = "mlflow"
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
        flush_timeout: float = 10.0,
    ) -> None:
        if not system_metrics_interval > 0:
            raise UserError(
                f"{system_metrics_interval} is not above 0",
                key="system_metrics_interval",
                remedy="Use seconds, or system_metrics=false.",
            )
        check_checkpoints(checkpoints)
        super().__init__(
            flush_timeout=flush_timeout,
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
                # What the address depends on besides: `sync.py` may be typed elsewhere, and later.
                "folder": str(Path.cwd()),
                "environment": os.environ.get("MLFLOW_TRACKING_URI"),
            },
        )
        self._all_nodes = system_metrics and system_metrics_nodes
        self._node: NodeProcess | None = None

    def before_run(self, engine: Engine) -> None:
        """Start the follower; on a machine without rank 0, what logs its load, if that is asked for."""
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
        """On rank 0, let the follower begin."""
        if engine.distributed.is_main:
            super().before_train(engine)

    def after_run(self, engine: Engine) -> None:
        """Send the rest, or end what logs this machine's load; in bounded time."""
        if engine.distributed.is_main:
            super().after_run(engine)
        elif self._node is not None:
            self._node.stop()
