"""LightningCallback: a callback written for Lightning, at the matching mount points."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hydraloop.compat.adapter import (
    Adapter,
    name_of,
    overridden,
    refuse_attached,
    refuse_known,
    require_object,
)
from hydraloop.compat.entries import loaded, to_be_saved
from hydraloop.compat.facade import Context
from hydraloop.compat.lightning_methods import ALWAYS, ATTACHED, BASES, INSTEAD, POINTS, STAGES, UNFREEZES
from hydraloop.compat.lightning_trainer import Trainer
from hydraloop.engine.checkpoint.format import load
from hydraloop.engine.train_mode import in_eval_mode
from hydraloop.errors import UserError, suggestion

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine


class LightningCallback(Adapter):
    """Runs a Lightning callback: `LightningCallback(EarlyStopping(monitor="val_loss"))`.

    What carries over, with Lightning's arguments and in Lightning's order:

    * setup, teardown, on_fit_start, on_fit_end, on_train_start, on_train_end, on_exception
    * on_train_epoch_start, on_train_epoch_end (behind the epoch's validation), on_train_batch_start,
      on_train_batch_end, on_after_backward, on_before_optimizer_step
    * on_validation_… and on_test_…: start, end, epoch_start, epoch_end, batch_start, batch_end; the model is in
      evaluation mode, without gradients
    * on_save_checkpoint, on_load_checkpoint, state_dict, load_state_dict
    * on_sanity_check_…: never called, as with `num_sanity_val_steps=0`

    and these attributes (`lightning_trainer.py` and `lightning_module.py` say what each is):

    * trainer: current_epoch, global_step, max_epochs, max_steps, num_training_batches, num_val_batches,
      num_test_batches, is_last_batch; training, validating, testing, evaluating, predicting, sanity_checking, state
      (fn, stage, status); should_stop, which may be set; callback_metrics, logged_metrics; lightning_module, model,
      optimizers, train_dataloader, val_dataloaders, test_dataloaders, callbacks; logger and loggers (log_metrics);
      strategy (root_device, reduce_boolean_decision, broadcast, barrier), is_global_zero, global_rank, local_rank,
      world_size; default_root_dir, log_dir, accumulate_grad_batches, check_val_every_n_epoch, val_check_interval,
      fast_dev_run, save_checkpoint
    * pl_module: log, log_dict, print, trainer, device, current_epoch, global_step, global_rank, logger, optimizers,
      automatic_optimization, calling it, and every public attribute of the task (model, parameters, train, eval, …)

    Anything else of these is a `NoCounterpartError` that names it, the callback and its method. on_before_backward,
    on_before_zero_grad and on_predict_… have no mount point: a callback with one is refused, unless `ignore` names
    it. A callback that uses `self.log` or `self.log_dict` is refused; `pl_module.log` is the same. Of Lightning's own,
    EarlyStopping, Timer, LambdaCallback, SpikeDetection and what derives from BaseFinetuning work; those of `INSTEAD`
    are refused at once, with the option that is here for them. A run with a BaseFinetuning can be resumed only from a
    checkpoint of before it unfroze something: a later one, which has groups of parameters that the optimizer does not
    start with, is refused.

    What differs: the metrics are those of the task, in `callback_metrics` as `accuracy` and as `val_accuracy`;
    `outputs` of a train batch has the batch's own mean loss, whatever `accumulate`, that of a validation batch is what
    the task's `evaluate` returned; after on_validation_batch_end an average (`ema`) is no longer in the model;
    `pl_module` is neither an `nn.Module` nor a `LightningModule` to `isinstance`;
    on_train_epoch_end is not called for an epoch that training ends within. A checkpoint is hydraloop's, and its own
    entries cannot be changed, at whatever depth, in on_save_checkpoint and on_load_checkpoint (a write through a
    tensor's `.data` is not seen, and in on_save_checkpoint it changes the run). save_checkpoint is an error in
    teardown, on_exception and on_save_checkpoint. Scalars with a name that hydraloop's own numbers have (epoch, loss,
    …) are `<hook>/<name>` in the records, as a warning says once. As in Lightning, only on_exception is called once
    something was raised.

    Mount points: before_train, before_val, after_val_epoch, after_val, before_test, after_test_epoch, after_run, and
    those that the callback's class uses. Priority NORMAL: Lightning has none. Cost: about 2.5 µs a call beside the
    callback's own; a host sync only if the callback has one. State: the callback's own.

    Args:
        callback: an object of a class derived from Lightning's `Callback`, or with methods like one.
        ignore: names of its methods without a mount point that it can do without.

    Raises:
        UserError: it is no callback, has a method without a mount point, uses `self.log`, or is one of Lightning's own
            that does not carry over.
    """

    framework = "lightning"
    attached = ATTACHED

    def __init__(self, callback: Any, *, ignore: Sequence[str] = ()) -> None:
        require_object(callback, "callback", "a Lightning callback")
        refuse_known(callback, ("lightning", "pytorch_lightning"), INSTEAD, "callback")
        own = overridden(callback, BASES)
        missing = [name for name in own if name.startswith("on_") and name not in POINTS and name not in ignore]
        if missing:
            raise UserError(
                f"{name_of(callback)} has {', '.join(missing)}, for which hydraloop has no mount point",
                key="callback",
                remedy=f"If it can do without: ignore=[{','.join(missing)}]. {suggestion(missing[0], POINTS)}",
            )
        used = [name for name in own if name in POINTS]
        if not used:
            known = ", ".join(POINTS)
            raise UserError(
                f"{name_of(callback)} has no method of a callback", key="callback", remedy=f"Known: {known}."
            )
        refuse_attached(callback, [name for name in own if name not in ignore], ATTACHED, "callback")
        self.wrapped = callback
        self._own = frozenset(used)
        self._trainer: Trainer | None = None
        self._fn: str | None = None
        self._ended = 0  # the epoch whose on_train_epoch_end was called last
        self._loaded: dict[str, Any] = {}
        points = {point for name in used for point in POINTS[name]}
        if any(kind.__name__ == UNFREEZES for kind in type(callback).__mro__):
            points.add("before_run")
        self._use_only(points.union(ALWAYS), state="state_dict" in own)

    # The run. ------------------------------------------------------------------------------------------------------

    def before_run(self, engine: Engine) -> None:
        """For a callback that unfreezes: look whether it can be resumed.

        Raises:
            UserError: the checkpoint has groups that the optimizer gets from the callback only later.
        """
        path = engine.settings.resume
        if path is None or engine.loaded:
            return
        checkpoint = load(path, mmap=True)
        if "optimizer" not in checkpoint:
            return
        saved, own = len(checkpoint["optimizer"]["param_groups"]), len(engine.optimizer.param_groups)
        if saved != own:
            raise UserError(
                f"in {path} the optimizer has {saved} groups of parameters, and it starts with {own}: a run cannot be "
                f"resumed from behind the point where {name_of(self.wrapped)} unfreezes parameters",
                key="resume",
                remedy=f"Resume from a checkpoint of before that, or start a new run with load_from={path}.",
            )

    def after_load_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """Keep a checkpoint that is resumed from for on_load_checkpoint, which comes behind setup."""
        if engine.settings.resume is not None:
            self._loaded["on_load_checkpoint"] = checkpoint

    def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """on_save_checkpoint; entries may be added."""
        with to_be_saved(checkpoint, self, "on_save_checkpoint") as lent:
            self._call(engine, "on_save_checkpoint", lent)

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        """on_exception."""
        self._call(engine, "on_exception", error)

    def after_run(self, engine: Engine) -> None:
        """teardown; not after an error."""
        if engine.error is None:
            self._tear_down(engine)
        self._fn = None
        self._trainer_of(engine).state.becomes(fn=None)

    # Training. -----------------------------------------------------------------------------------------------------

    def before_train(self, engine: Engine) -> None:
        """setup, what is loaded, on_fit_start, on_train_start."""
        resumed = bool(self._loaded)
        self._begin(engine, "fit")
        groups = engine.optimizer.param_groups
        self._call(engine, "on_fit_start")
        if resumed:  # Lightning loads the optimizer's state behind on_fit_start, where BaseFinetuning puts older groups
            engine.optimizer.param_groups = groups
        self._call(engine, "on_train_start")

    def after_train(self, engine: Engine) -> None:
        """on_train_end, on_fit_end; not after an error."""
        if engine.error is None:
            self._call(engine, "on_train_end")
            self._call(engine, "on_fit_end")

    def before_train_epoch(self, engine: Engine) -> None:
        """on_train_epoch_start; not when a run resumes within the epoch."""
        if not engine.resumed_in_epoch:
            self._call(engine, "on_train_epoch_start")

    def after_train_epoch(self, engine: Engine) -> None:
        """on_train_epoch_end, unless a validation comes first."""
        if not engine.validation_due():  # Lightning ends an epoch with its validation
            self._end_epoch(engine)

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """on_train_batch_start."""
        self._call(engine, "on_train_batch_start", batch, batch_idx)

    def after_backward(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """on_after_backward."""
        self._call(engine, "on_after_backward")

    def before_optimizer_step(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """on_before_optimizer_step."""
        self._call(engine, "on_before_optimizer_step", engine.optimizer)

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """on_train_batch_end."""
        self._call(engine, "on_train_batch_end", outputs, batch, batch_idx)

    # Validation and test. ------------------------------------------------------------------------------------------

    def before_val(self, engine: Engine) -> None:
        """on_validation_start."""
        self._begin(engine, self._fn or "validate")
        self._call(engine, "on_validation_start")

    def before_val_epoch(self, engine: Engine) -> None:
        """on_validation_epoch_start."""
        self._call(engine, "on_validation_epoch_start")

    def before_val_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """on_validation_batch_start."""
        self._call(engine, "on_validation_batch_start", batch, batch_idx)

    def after_val_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """on_validation_batch_end."""
        self._call(engine, "on_validation_batch_end", outputs, batch, batch_idx)

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """on_validation_epoch_end."""
        self._trainer_of(engine).take(metrics, "", "val_")
        self._call(engine, "on_validation_epoch_end")

    def after_val(self, engine: Engine) -> None:
        """on_validation_end, and on_train_epoch_end where this was the validation of an epoch."""
        self._call(engine, "on_validation_end")
        if self._fn == "fit":
            self._trainer_of(engine).state.becomes(stage="train")
            if engine.progress.batch_in_epoch == 0:
                self._end_epoch(engine)

    def before_test(self, engine: Engine) -> None:
        """on_test_start."""
        self._begin(engine, "test")
        self._call(engine, "on_test_start")

    def before_test_epoch(self, engine: Engine) -> None:
        """on_test_epoch_start."""
        self._call(engine, "on_test_epoch_start")

    def before_test_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """on_test_batch_start."""
        self._call(engine, "on_test_batch_start", batch, batch_idx)

    def after_test_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """on_test_batch_end."""
        self._call(engine, "on_test_batch_end", outputs, batch, batch_idx)

    def after_test_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """on_test_epoch_end."""
        self._trainer_of(engine).take(metrics, "test_")
        self._call(engine, "on_test_epoch_end")

    def after_test(self, engine: Engine) -> None:
        """on_test_end."""
        self._call(engine, "on_test_end")

    # State. --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The callback's own."""
        state: dict[str, Any] = self.wrapped.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep the callback's own state for it, until behind setup and on_load_checkpoint."""
        self._loaded["load_state_dict"] = state

    # Within. -------------------------------------------------------------------------------------------------------

    def _begin(self, engine: Engine, fn: str) -> None:
        """Fit, validate or test begins, if it has not: teardown of the one before, setup, and what was loaded."""
        if fn == self._fn:
            return
        self._tear_down(engine)
        self._fn = fn
        self._trainer_of(engine).state.becomes(fn=fn, stage="train" if fn == "fit" else fn)
        self._call(engine, "setup", fn)
        kept, self._loaded = self._loaded, {}
        if "on_load_checkpoint" in kept:
            with loaded(kept["on_load_checkpoint"], self, "on_load_checkpoint") as lent:
                self._call(engine, "on_load_checkpoint", lent)
        if "load_state_dict" in kept:
            self.wrapped.load_state_dict(kept["load_state_dict"])

    def _tear_down(self, engine: Engine) -> None:
        """teardown of what is going on, if anything is."""
        if self._fn is not None:
            self._trainer_of(engine).state.becomes(fn=self._fn)  # another callback of this engine may be further on
            self._call(engine, "teardown", self._fn)

    def _end_epoch(self, engine: Engine) -> None:
        """on_train_epoch_end, once an epoch."""
        if self._ended != engine.progress.epoch:
            self._ended = engine.progress.epoch
            self._call(engine, "on_train_epoch_end")

    def _trainer_of(self, engine: Engine) -> Trainer:
        """The trainer that all adapted callbacks of the engine share, kept by the first of them."""
        if self._trainer is None or self._trainer.context.engine is not engine:
            first = next(hook for hook in engine.hooks.values() if isinstance(hook, LightningCallback))
            if first._trainer is None or first._trainer.context.engine is not engine:
                first._trainer = Trainer(Context(engine))
            self._trainer = first._trainer
        return self._trainer

    def _call(self, engine: Engine, name: str, *arguments: Any) -> None:
        if name not in self._own:
            return
        trainer = self._trainer_of(engine)
        stage = STAGES.get(name.split("_")[1]) if name.startswith("on_") else None
        if stage is not None:
            trainer.state.becomes(stage=stage)
        if stage in ("validate", "test") and "_batch_" not in name:
            with in_eval_mode(engine.task), torch.no_grad():
                trainer.context.call(self, name, trainer, trainer.lightning_module, *arguments)
        else:
            trainer.context.call(self, name, trainer, trainer.lightning_module, *arguments)
