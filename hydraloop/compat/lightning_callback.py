"""LightningCallback: a callback written for Lightning, at the matching mount points."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hydraloop.compat.adapter import Adapter, check_object, lent, overridden
from hydraloop.compat.lightning_trainer import Trainer
from hydraloop.engine.checkpoint.format import peek
from hydraloop.engine.engine import Engine
from hydraloop.engine.evaluation.module_modes import in_eval_mode
from hydraloop.errors import UserError, suggestion

BASES = ("lightning.pytorch.callbacks.callback", "pytorch_lightning.callbacks.callback")
POINTS: dict[str, str | None] = {
    **dict.fromkeys(("setup", "teardown", "on_fit_start", "on_train_start"), None),
    **dict.fromkeys(("on_validation_start", "on_validation_epoch_end", "on_validation_end"), None),
    **dict.fromkeys(("on_test_start", "on_test_epoch_end", "on_sanity_check_start", "on_sanity_check_end"), None),
    "on_fit_end": "after_train",
    "on_train_end": "after_train",
    "on_train_epoch_start": "before_train_epoch",
    "on_train_epoch_end": "after_train_epoch",
    "on_train_batch_start": "before_train_iter",
    "on_train_batch_end": "after_train_iter",
    "on_after_backward": "after_backward",
    "on_before_optimizer_step": "before_optimizer_step",
    "on_validation_epoch_start": "before_val_epoch",
    "on_validation_batch_start": "before_val_iter",
    "on_validation_batch_end": "after_val_iter",
    "on_test_epoch_start": "before_test_epoch",
    "on_test_batch_start": "before_test_iter",
    "on_test_batch_end": "after_test_iter",
    "on_test_end": "after_test",
    "on_save_checkpoint": "before_save_checkpoint",
    "on_load_checkpoint": "after_load_checkpoint",
    "on_exception": "on_exception",
}
"""Supported methods and the mount point of each; None: one of `ALWAYS`, or never called."""
ALWAYS = (
    "after_load_checkpoint", "before_train", "before_val", "after_val_epoch", "after_val", "before_test",
    "after_test_epoch", "after_run",
)  # fmt: skip
"""Mount points that every adapter uses, to know which part of a run it is in. They are not in an iteration."""
INSTEAD = {
    "BatchSizeFinder": "Sweep over data.loader.batch_size: python train.py -m data.loader.batch_size=32,64,128.",
    "DeviceStatsMonitor": "Use hooks=memory_profiler.",
    "GradientAccumulationScheduler": "Use engine.accumulate.",
    "LearningRateFinder": "Sweep over optimizer.lr: python train.py -m optimizer.lr=1e-4,1e-3,1e-2.",
    "LearningRateMonitor": "The records of default_hooks.logger have lr and momentum.",
    "ModelCheckpoint": "Use default_hooks.checkpoint, with save_best for its monitor.",
    "ModelPruning": "Prune in a custom hook, with torch.nn.utils.prune.",
    "ModelSummary": "The number of parameters is printed at the start.",
    "OnExceptionCheckpoint": "Use default_hooks.checkpoint, with by_epoch=false and a short interval.",
    "ProgressBar": "Use default_hooks.progress.",
    "StochasticWeightAveraging": "Use hooks=ema hooks.ema.ema_type=stochastic.",
    "ThroughputMonitor": "The records of default_hooks.logger have samples_per_second, time and mfu.",
    "WeightAveraging": "Use hooks=ema.",
}
"""Lightning's own callbacks that are not supported, and what to use instead."""
UNFREEZES = "BaseFinetuning"
"""Lightning's class whose callbacks may add parameter groups to the optimizer during a run."""
STAGES = {"fit": "train", "train": "train", "validation": "validate", "test": "test"}
"""The stage of a method, by the second word of its name."""


class LightningCallback(Adapter):
    """Runs a Lightning callback: `LightningCallback(EarlyStopping(monitor="val_loss"))`.

    It calls the methods in `POINTS`, with Lightning's arguments and in Lightning's order, and
    state_dict and load_state_dict. on_train_epoch_end comes after the epoch's validation. In validation and test, the
    model is in evaluation mode without gradients. There is no sanity check, as with `num_sanity_val_steps=0`.
    `lightning_trainer.py` lists the attributes of trainer and pl_module. self.log and self.log_dict are pl_module's.

    on_before_backward, on_before_zero_grad and on_predict_… have no mount point: a callback with one is rejected,
    unless `ignore` names it. Of Lightning's own callbacks, EarlyStopping, Timer, LambdaCallback, SpikeDetection and
    classes derived from BaseFinetuning work. The others are rejected, with the option to use instead.

    Differences from Lightning, besides those of `Adapter`:

    * `callback_metrics` has the metrics of the task, as `accuracy` and as `val_accuracy`.
    * `outputs` of a training batch has the mean loss of the batch itself, for any `accumulate`. That of a validation
      batch is what the task's `evaluate` returned. After on_validation_batch_end, averaged weights (`ema`) are no
      longer in the model.
    * on_train_epoch_end is not called if training ends in the middle of the epoch.
    * A run with a BaseFinetuning can be resumed only from a checkpoint before it unfreezes. A later one has more
      parameter groups than the optimizer at the start and is rejected.

    Mount points: after_load_checkpoint, before_train, before_val, after_val_epoch, after_val, before_test,
    after_test_epoch, after_run, and those that the callback's class uses. As in Lightning, only on_exception is called
    after an error. Priority NORMAL.

    Args:
        callback: an object of a class derived from Lightning's `Callback`, or with such methods.
        ignore: names of methods without a mount point that the callback does not need.

    Raises:
        UserError: it is not a callback, has a method without a mount point, or is one of Lightning's own that is not
            supported.
    """

    stand_in = Trainer

    def __init__(self, callback: Any, *, ignore: Sequence[str] = ()) -> None:
        check_object(callback, ("lightning", "pytorch_lightning"), INSTEAD, "callback", "a Lightning callback")
        own, kind = overridden(callback, BASES), type(callback).__name__
        missing = [name for name in own if name.startswith("on_") and name not in POINTS and name not in ignore]
        if missing:
            raise UserError(
                f"{kind} has {', '.join(missing)}, for which hydraloop has no mount point",
                key="callback",
                remedy=f"If it works without them: ignore=[{','.join(missing)}]. {suggestion(missing[0], POINTS)}",
            )
        used = [name for name in own if name in POINTS]
        if not used:
            raise UserError(f"{kind} has no method of a callback", key="callback", remedy=", ".join(POINTS))
        self.wrapped = callback
        self._own = frozenset(used)
        self._fn: str | None = None
        self._ended = 0
        """The last epoch whose on_train_epoch_end was called."""
        self._loaded: dict[str, Any] = {}
        """Loaded entries that the callback has not received yet."""
        points = {point: name for name in used if (point := POINTS[name])}
        made = {point: _calling(name) for point, name in points.items() if point not in vars(LightningCallback)}
        unfreezes = any(base.__name__ == UNFREEZES for base in type(callback).__mro__)
        self._restrict({*points, *ALWAYS, *(["before_run"] if unfreezes else [])}, made, state="state_dict" in own)

    def before_run(self, engine: Engine) -> None:
        """For a callback that unfreezes parameters: check that the checkpoint can be resumed from.

        Raises:
            UserError: the checkpoint has parameter groups that the callback has added.
        """
        path = engine.settings.resume
        if path is None or engine.checkpoints.loaded:
            return
        position = peek(path, key="resume")
        groups = None if position is None else position.meta.get("groups")
        now = len(engine.run.groups)
        if groups is not None and len(groups) != now:
            raise UserError(
                f"in {path} the optimizer has {len(groups)} parameter groups, but it starts with {now}: "
                f"a run cannot be resumed after {type(self.wrapped).__name__} has unfrozen parameters",
                key="resume",
                remedy=f"Resume from an earlier checkpoint, or start a new run with load_from={path}.",
            )

    def after_load_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Keep the checkpoint of a resumed run for on_load_checkpoint, which comes after setup.

        If setup is done, on_load_checkpoint and load_state_dict are called now.
        """
        goes_back = self._fn is not None
        if "on_load_checkpoint" in self._own and (engine.settings.resume is not None or goes_back):
            self._loaded["on_load_checkpoint"] = checkpoint
        if goes_back:
            self._ended = 0
            self._receive(engine)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the callback's state until after on_load_checkpoint."""
        self._loaded["load_state_dict"] = state

    def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """on_save_checkpoint; entries may be added."""
        with lent(checkpoint, self, "on_save_checkpoint", saving=True) as copied:
            self._call(engine, "on_save_checkpoint", copied)

    def after_run(self, engine: Engine) -> None:
        """teardown, unless there was an error."""
        if engine.error is None:
            self._tear_down(engine)
        self._fn = None
        self._stand_in_of(engine).state.becomes(fn=None)

    def before_train(self, engine: Engine) -> None:
        """setup, on_load_checkpoint and load_state_dict, on_fit_start, on_train_start."""
        resumed = bool(self._loaded)
        self._begin(engine, "fit")
        groups = [(optimizer, optimizer.param_groups) for optimizer in engine.optimizers.values()]
        self._call(engine, "on_fit_start")
        for optimizer, own in groups if resumed else ():
            optimizer.param_groups = own  # BaseFinetuning restores older groups; Lightning then loads the state
        self._call(engine, "on_train_start")

    def after_train(self, engine: Engine) -> None:
        """on_train_end, on_fit_end; unless there was an error."""
        if engine.error is None:
            self._call(engine, "on_train_end")
            self._call(engine, "on_fit_end")

    def before_train_epoch(self, engine: Engine) -> None:
        """on_train_epoch_start, unless a run resumes in the middle of the epoch."""
        if not engine.resumed_in_epoch:
            self._call(engine, "on_train_epoch_start")

    def after_train_epoch(self, engine: Engine) -> None:
        """on_train_epoch_end, unless a validation comes first: Lightning ends an epoch with its validation."""
        if not engine.evaluator.is_due():
            self._end_epoch(engine)

    def after_backward(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """on_after_backward."""
        self._call(engine, "on_after_backward")

    def before_optimizer_step(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """on_before_optimizer_step."""
        self._call(engine, "on_before_optimizer_step", engine.stepper.optimizer)

    def before_val(self, engine: Engine) -> None:
        """on_validation_start."""
        self._begin(engine, self._fn or "validate")
        self._call(engine, "on_validation_start")

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """on_validation_epoch_end."""
        self._stand_in_of(engine).add_metrics(metrics, "", "val_")
        self._call(engine, "on_validation_epoch_end")

    def after_val(self, engine: Engine) -> None:
        """on_validation_end, and on_train_epoch_end if this was the validation of an epoch."""
        self._call(engine, "on_validation_end")
        if self._fn == "fit":
            self._stand_in_of(engine).state.becomes(stage="train")
            if engine.progress.batch_in_epoch == 0:
                self._end_epoch(engine)

    def before_test(self, engine: Engine) -> None:
        """on_test_start."""
        self._begin(engine, "test")
        self._call(engine, "on_test_start")

    def after_test_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """on_test_epoch_end."""
        self._stand_in_of(engine).add_metrics(metrics, "test_")
        self._call(engine, "on_test_epoch_end")

    def _begin(self, engine: Engine, fn: str) -> None:
        """Begin fit, validate or test: teardown of the previous one, setup, then the loaded entries."""
        if fn == self._fn:
            return
        self._tear_down(engine)
        self._fn = fn
        trainer: Trainer = self._stand_in_of(engine)
        trainer.state.becomes(fn=fn, stage="train" if fn == "fit" else fn)
        for name in ("log", "log_dict"):  # Lightning's trainer sets them too
            if not hasattr(type(self.wrapped), name):
                setattr(self.wrapped, name, getattr(trainer.lightning_module, name))
        self._call(engine, "setup", fn)
        self._receive(engine)

    def _receive(self, engine: Engine) -> None:
        """on_load_checkpoint and load_state_dict, if there are loaded entries."""
        kept, self._loaded = self._loaded, {}
        if "on_load_checkpoint" in kept:
            with lent(kept["on_load_checkpoint"], self, "on_load_checkpoint", saving=False) as copied:
                self._call(engine, "on_load_checkpoint", copied)
        if "load_state_dict" in kept:
            self.wrapped.load_state_dict(kept["load_state_dict"])

    def _tear_down(self, engine: Engine) -> None:
        """teardown, if something has begun."""
        if self._fn is not None:
            self._stand_in_of(engine).state.becomes(fn=self._fn)  # another callback may have changed it
            self._call(engine, "teardown", self._fn)

    def _end_epoch(self, engine: Engine) -> None:
        """on_train_epoch_end, once an epoch."""
        if self._ended != engine.progress.epoch:
            self._ended = engine.progress.epoch
            self._call(engine, "on_train_epoch_end")

    def _call(self, engine: Engine, name: str, *arguments: Any) -> None:
        if name not in self._own:
            return
        trainer: Trainer = self._stand_in_of(engine)
        stage = STAGES.get(name.split("_")[1]) if name.startswith("on_") else None
        if stage is not None:
            trainer.state.becomes(stage=stage)
        arguments = (trainer, trainer.lightning_module, *arguments)
        if stage in ("validate", "test") and "_batch_" not in name:
            with in_eval_mode(engine.task), torch.no_grad():
                self._invoke(trainer.context, name, *arguments)
        else:
            self._invoke(trainer.context, name, *arguments)


def _calling(name: str) -> Callable[..., None]:
    """Make the method of a mount point that calls Lightning's, which takes the arguments in reverse order."""

    def method(self: LightningCallback, engine: Engine, *arguments: Any) -> None:
        self._call(engine, name, *reversed(arguments))

    return method
