"""TensorBoardLoggerHook: writes the run to TensorBoard, and optionally histograms of weights and gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from hydraloop.engine.distributed.fsdp import local
from hydraloop.engine.engine import Engine
from hydraloop.engine.interval import Every
from hydraloop.engine.records.records import histograms as counted
from hydraloop.engine.records.records import write_json
from hydraloop.schemas.option_checks import check_at_least
from hydraloop.tracking.hook import TrackerHook
from hydraloop.tracking.tracker import TENSORBOARD


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
        self._due = Every(histograms).due
        self._seen = 0  # iteration of the last histograms
        self._counted: dict[str, Any] | None = None
        if histograms is None:
            self.idle_points = ("before_optimizer_step", "after_train_iter")

    def before_run(self, engine: Engine) -> None:
        self.check_only_one(engine, "write the same files")
        super().before_run(engine)

    def at_position(self, engine: Engine) -> None:
        """Count from the iteration where the run begins or continues."""
        self._seen, self._counted = engine.progress.iteration, None

    def before_optimizer_step(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Count weights and gradients if an iteration since the last step was due."""
        iteration = engine.progress.iteration + 1  # not completed yet
        if self._counted is not None:  # another step of the task, with other gradients
            self._counted = {**counted(_tensors(engine)), **self._counted}
        elif self._due(iteration, done=self._seen):
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
