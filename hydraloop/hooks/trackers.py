"""The hooks of trackers: MLflow, Weights & Biases and TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torch import Tensor

from hydraloop.engine.distributed.fsdp import local
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Priority
from hydraloop.engine.interval import Every
from hydraloop.engine.records import histograms as counted
from hydraloop.engine.records import write_json
from hydraloop.schemas.option_checks import CHECKPOINTS, check_at_least, check_choice
from hydraloop.tracking.tracker import MLFLOW, TENSORBOARD, WANDB
from hydraloop.tracking.tracker_hook import TrackerHook


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
    conflict = "use the same run id"
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


class WandbLoggerHook(TrackerHook):
    """Shows the run at Weights & Biases, or writes files to `<run_dir>/wandb/` that `wandb sync` uploads.

    A separate process, the sender, makes one W&B run. Each record of `metrics.jsonl` is a row of its history
    (`train/loss`, `val/accuracy`, …): W&B's step is the line of the record, and the axis is the iteration. Pictures,
    texts, tables and histograms are in the row of their record. The run also has the config (secrets masked;
    `hydraloop` in it describes how the run was started), W&B's system metrics, and at the end status, error and
    `result.json`; a metric of `save_best` has its best value in the summary. If W&B's processes or the network fail,
    `hydraloop sync` completes the records later.

    A run is online if an API key is configured, else offline, unless `WANDB_MODE` or `+hooks.wandb.init.mode=offline`
    says otherwise, and it stays so. It never asks for a key. A resumed run continues the same W&B run; changes of the
    config are `resume_1/…`. Rows that W&B has had are not sent again; if a resume replaces them, a warning names them.
    Offline, all rows are written again until `wandb sync` has uploaded them, then only later rows. A directory that is
    uploaded while its run writes is an error: the records after that are not sent.

    Each job of a sweep is a run, in a group named after the sweep. `WANDB_RUN_ID` is ignored.

    Priority VERY_LOW: other hooks' records of an iteration come first. Runs on rank 0 only. No host sync, and nothing
    in an iteration: the sender reads what the logger has written. No state. Options: `WandbLoggerHookConf`.

    Raises:
        UserError: an option is out of range, or the run has a second hook of this class.
    """

    kind = WANDB
    conflict = "make the same W&B run"
    library = "wandb"

    def __init__(
        self,
        *,
        init: Mapping[str, Any] = MappingProxyType({}),
        log_code: bool = False,
        checkpoints: str | None = None,
        flush_timeout: float = 10.0,
        interval: int = 1,
    ) -> None:
        check_choice(CHECKPOINTS, checkpoints=checkpoints)
        options = {"init": dict(init), "log_code": log_code, "checkpoints": checkpoints}
        super().__init__(flush_timeout=flush_timeout, interval=interval, options=options)


class TensorBoardLoggerHook(TrackerHook):
    """Shows the run in TensorBoard: `tensorboard --logdir <run_dir>/tensorboard`, or the directory of a sweep.

    A separate process, the sender, writes event files to `<run_dir>/tensorboard/`, for a job of a sweep to
    `tensorboard/lr=0.01/`, because TensorBoard names a run after its folder. It shows:

    - every number of every record, `train/loss` or `val/accuracy`, over the iteration; the speed as `train_perf/time`,
      so that the loss is on the first page
    - pictures, texts, tables and histograms that are logged with the engine (`engine.log_image`); not files
    - the config (TEXT tab)
    - the options of the run, how it ended, and the last values of validation and test and the training loss (HPARAMS
      tab)

    A resumed run continues the same charts. Each sender writes all records to a new file.

    With `histograms`, weights and gradients of all trainable parameters are counted in 64 bins, at the next optimizer
    step: gradients unscaled and clipped, as the optimizer uses them; weights before the step. Entries that are not
    finite are counted as `nonfinite/gradients/…`. The counts are one object, `media/train/parameters_iter_400.json`,
    which other trackers get, too. For a sharded model (FSDP) they are those of rank 0's shards. Sparse gradients are
    left out.

    Priority VERY_LOW: gradients are already clipped, and other hooks' records of an iteration come first. Runs on rank
    0 only. Cost: one host sync and a copy to the host for each histogram, nothing in an iteration otherwise.
    No state. Options: `TensorBoardLoggerHookConf`.

    Raises:
        UserError: `histograms` or `flush_timeout` is out of range, or the run has a second hook of this class.
    """

    kind = TENSORBOARD
    conflict = "write the same files"
    library = "tensorboard"

    def __init__(
        self,
        *,
        histograms: int | None = None,
        flush_timeout: float = 10.0,
        interval: int = 1,
    ) -> None:
        check_at_least(1, "Use 1 or more, or null to switch it off.", histograms=histograms)
        super().__init__(flush_timeout=flush_timeout, interval=interval, options={})
        self._every = Every(histograms)
        self._seen = 0  # iteration of the last histograms
        self._counted: dict[str, Any] | None = None
        if histograms is None:
            self.idle_points = ("before_optimizer_step", "after_train_iter")

    def at_position(self, engine: Engine) -> None:
        """Count from the iteration where the run begins or continues."""
        self._seen, self._counted = engine.progress.iteration, None

    def before_optimizer_step(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Count weights and gradients if the interval fired since the last step."""
        iteration = engine.progress.iteration + 1  # not completed yet
        if self._counted is not None:  # another step of the task, with other gradients
            self._counted = {**counted(_tensors(engine)), **self._counted}
        elif self._every.times_until(iteration) > self._every.times_until(self._seen):
            self._seen = iteration
            self._counted = counted(_tensors(engine))

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Write the counts and announce them."""
        if self._counted is None:
            return
        content, self._counted = self._counted, None
        engine.records.log_object("histogram", "parameters", ".json", lambda path: write_json(path, content))


def _tensors(engine: Engine) -> dict[str, Tensor]:
    """Return trainable weights and their gradients; for sharded ones this rank's part."""
    found = {}
    for name, parameter in engine.model.named_parameters():
        if not parameter.requires_grad or parameter.is_complex():
            continue
        found[f"weights/{name}"] = local(parameter)
        if parameter.grad is not None and not parameter.grad.is_sparse:
            found[f"gradients/{name}"] = local(parameter.grad)
    return found
