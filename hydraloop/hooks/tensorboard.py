"""TensorBoardLoggerHook: the run's records in TensorBoard, with histograms of weights and gradients as an option."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hydraloop.engine.distributed.fsdp import local
from hydraloop.engine.interval import Every
from hydraloop.errors import UserError
from hydraloop.hooks.shared.histograms import histograms as counted
from hydraloop.hooks.shared.record_entries import position
from hydraloop.tracking.choices import check_only_one
from hydraloop.tracking.hook import TrackerHook

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

HISTOGRAMS = "histograms"
"""The folder of what was counted, in the run directory, and the record's entry that names a file there."""


class TensorBoardLoggerHook(TrackerHook):
    """Shows the run in TensorBoard: `tensorboard --logdir <run_dir>/tensorboard`, or the directory of a sweep.

    A process of its own writes event files to `<run_dir>/tensorboard/`: every number of every record, `train/loss` or
    `val/accuracy`, over the iteration; the pictures of `visualization`; and, for the HPARAMS tab, what the run was
    trained with, how it ended, and as its metrics the last ones of validation and test and the training loss. A run
    that is resumed goes on in the same charts: what it does again is cut from the older files.

    With `histograms`, every so many iterations the weights and the gradients of all trainable parameters are counted in
    64 bins, at the next optimizer step: gradients as the optimizer gets them, unscaled and behind `grad_clip`, so after
    clipping; weights as these gradients were taken at. Entries that are not finite are counted apart, as
    `nonfinite/gradients/…`. The counts are in `<run_dir>/histograms/iter_400.json`, announced by a record, `{"mode",
    "epoch", "iteration", "histograms": "histograms/iter_400.json"}`. Of a sharded model (FSDP) they are those of
    rank 0's shards. Sparse gradients are left out.

    Mount points: before_run, before_train, before_optimizer_step, after_train_iter, on_log, after_run. Priority
    VERY_LOW: gradients are clipped by then, and other hooks' records of an iteration stand in front. Rank 0 only. No
    host sync but where histograms are due: two then, and a file of some 2 kB a parameter; without histograms it is not
    called in an iteration. No state. Errors warn: no training fails for its charts.

    Args:
        histograms: iterations between two histograms, at least 1; None: none.
        hparams: keys of the config, or beginnings of keys up to a dot (`optimizer`), that are columns of the HPARAMS
            table; None: those given on the command line, and a few well-known ones.
        pictures: whether pictures are put into the event files too.
        flush_timeout: seconds that writing the rest may take after the run's end, from 0 to 86,400.

    Raises:
        UserError: an interval below 1; a `flush_timeout` out of its range; a second hook of this class in a run.
    """

    kind = "tensorboard"

    def __init__(
        self,
        *,
        histograms: int | None = None,
        hparams: Sequence[str] | None = None,
        pictures: bool = True,
        flush_timeout: float = 10.0,
    ) -> None:
        if histograms is not None and histograms < 1:
            raise UserError(f"{histograms} is below 1", key="histograms", remedy="Use 1 or more, or null for none.")
        chosen = None if hparams is None else [str(key) for key in hparams]
        super().__init__(flush_timeout=flush_timeout, options={"hparams": chosen, "pictures": pictures})
        self._due = Every(histograms).due
        self._seen = 0
        """The iteration up to which nothing is due any more."""
        self._counted: dict[str, Any] | None = None
        if histograms is None:
            self.idle_points = ("before_optimizer_step", "after_train_iter")

    def before_run(self, engine: Engine) -> None:
        """Start the follower.

        Raises:
            UserError: there is another hook of this class, which would write to the same files.
        """
        check_only_one(engine, self, "write the same files")
        super().before_run(engine)

    def before_train(self, engine: Engine) -> None:
        """Let the follower begin; count from where the run goes on."""
        self._seen, self._counted = engine.progress.iteration, None
        super().before_train(engine)

    def before_optimizer_step(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Count weights and gradients where they are due, or have become due since the last step."""
        iteration = engine.progress.iteration + 1  # that one is not completed yet
        if self._due(iteration, done=self._seen):
            self._seen = iteration
            self._counted = counted(_tensors(engine))

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Write down what was counted, and announce it."""
        if self._counted is None:
            return
        content, self._counted = self._counted, None
        path = engine.run_dir / HISTOGRAMS / f"iter_{engine.progress.iteration}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content) + "\n", encoding="utf-8")
        engine.log_record({**position(engine, "train"), HISTOGRAMS: f"{HISTOGRAMS}/{path.name}"})


def _tensors(engine: Engine) -> dict[str, Tensor]:
    """Trainable weights and their gradients; of sharded ones this rank's part."""
    found = {}
    for name, parameter in engine.model.named_parameters():
        if not parameter.requires_grad or parameter.is_complex():
            continue
        found[f"weights/{name}"] = local(parameter)
        if parameter.grad is not None and not parameter.grad.is_sparse:
            found[f"gradients/{name}"] = local(parameter.grad)
    return found
