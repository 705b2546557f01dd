"""MMEngineHook: a hook written for MMEngine, at the same mount points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hydraloop.compat.adapter import (
    Adapter,
    name_of,
    overridden,
    refuse_known,
    require_object,
)
from hydraloop.compat.entries import loaded, to_be_saved
from hydraloop.compat.facade import Context
from hydraloop.compat.mmengine_runner import Runner
from hydraloop.engine.hook import GENERAL_POINTS, MOUNT_POINTS, Priority
from hydraloop.engine.train_mode import in_eval_mode
from hydraloop.errors import UserError, suggestion

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

_BASES = ("mmengine.hooks.hook",)
_ADDED = ("after_backward", "before_optimizer_step", "on_log", "on_exception")
_POINTS = tuple(point for point in MOUNT_POINTS if point not in _ADDED)
"""MMEngine's 22, all of which are here."""
INSTEAD = {
    "CheckpointHook": "Use default_hooks.checkpoint.",
    "EMAHook": "Use hooks=ema; ema_type=exponential, stochastic, momentum_annealing are MMEngine's.",
    "LoggerHook": "Use default_hooks.logger.",
    "NPUProfilerHook": "Use hooks=npu_profiler.",
    "NaiveVisualizationHook": "Use hooks=visualization.",
    "ParamSchedulerHook": "Use default_hooks.param_scheduler and the group scheduler.",
    "PrepareTTAHook": "Use hooks=tta.",
    "RuntimeInfoHook": "Use default_hooks.runtime_info.",
}
"""MMEngine's own hooks that do not carry over, and what is here for them."""


class MMEngineHook(Adapter):
    """Runs an mmengine hook object: `MMEngineHook(EmptyCacheHook(after_epoch=True))`.

    What carries over: all 22 mount points of MMEngine, with its arguments (`batch_idx`, `data_batch`, `outputs`,
    `metrics`, `checkpoint`), `_before_epoch` and the like, its helpers (`every_n_train_iters`, `end_of_epoch`, …), its
    priority, and these attributes of `runner` (`mmengine_runner.py` says what each is):

    * iter, epoch (counted from 0 where MMEngine does), max_iters, max_epochs, val_interval, val_begin
    * model, optim_wrapper (optimizer, param_groups, get_lr, get_momentum), save_checkpoint
    * train_dataloader, val_dataloader, test_dataloader, and train_loop, val_loop, test_loop with their dataloader; of
      train_loop also iter, epoch, max_iters, max_epochs, val_interval, val_begin and stop_training, which may be set
    * message_hub: update_scalar, update_scalars, get_scalar(…).current, update_info, update_info_dict, get_info,
      pop_info, runtime_info
    * logger, hooks, work_dir, log_dir, experiment_name, seed, rank, world_size, distributed

    Anything else of the runner is a `NoCounterpartError` that names it, the hook and the mount point; nothing of the
    runner can be replaced. Of MMEngine's own hooks EarlyStoppingHook, EmptyCacheHook, SyncBuffersHook, IterTimerHook,
    DistSamplerSeedHook and ProfilerHook work; the others (`INSTEAD`) are refused at once, with the option that is here
    for them.

    What differs: `data_batch` is the engine's batch, on the device; `outputs` of validation and test is what the task's
    `evaluate` returned; tensors of `outputs` are detached. As in MMEngine, after_train and after_run are not called
    when something was raised. In before_save_checkpoint and after_load_checkpoint, iter and epoch are completed ones.
    A checkpoint's own entries cannot be changed, at whatever depth: a changed one is an error that names it (a write
    through a tensor's `.data` is not seen, and where the checkpoint is about to be saved it changes the run). MMEngine
    calls after_load_checkpoint before the weights are in the model, hydraloop behind that: to revise them, change
    runner.model. save_checkpoint is an error in after_run and before_save_checkpoint. Scalars with a name that
    hydraloop's own numbers have (epoch, loss, …) are `<hook>/<name>` in the records, as a warning says once. A model or
    hook that asks mmengine's global MessageHub itself asks mmengine, not this run.

    Mount points: those that the hook's class uses. Priority: the hook's own, unless overridden. Cost: about 2.5 µs a
    call beside the hook's own; message_hub keeps tensors as they are, so a host sync is there only if the hook has one.
    State: the hook's own, where its class has `state_dict` (MMEngine itself saves none).

    Args:
        hook: an object of a class derived from mmengine's `Hook`, or with methods like one.

    Raises:
        UserError: it is no hook, has a method like a mount point that MMEngine does not have (MMCV's `before_epoch`),
            or is one of MMEngine's own that does not carry over.
    """

    framework = "mmengine"

    def __init__(self, hook: Any) -> None:
        require_object(hook, "hook", "an mmengine hook")
        refuse_known(hook, ("mmengine",), INSTEAD, "hook")
        own = overridden(hook, _BASES)
        for name in own:
            if name.startswith(("before_", "after_")) and name not in _POINTS:
                raise UserError(
                    f"{name_of(hook)}.{name} is no mount point of MMEngine, which would never call it",
                    key="hook",
                    remedy=f"{suggestion(name, _POINTS)} Hooks of MMCV 1 have to be brought to MMEngine's first.",
                )
        used = {point for point in own if point in _POINTS}
        for general, points in GENERAL_POINTS.items():
            if f"_{general}" in own:
                used.update(point for point, _ in points if hasattr(hook, point))
        if not used:
            raise UserError(
                f"{name_of(hook)} has none of MMEngine's mount points", key="hook", remedy=", ".join(_POINTS)
            )
        self.wrapped = hook
        self._runner: Runner | None = None
        self._use_only(used, state="state_dict" in own, priority=getattr(hook, "priority", Priority.NORMAL))

    # The run. ------------------------------------------------------------------------------------------------------

    def before_run(self, engine: Engine) -> None:
        """MMEngine's before_run."""
        self._call(engine, "before_run")

    def after_run(self, engine: Engine) -> None:
        """MMEngine's after_run; not after an error."""
        if engine.error is None:
            self._call(engine, "after_run")

    def before_save_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """MMEngine's before_save_checkpoint; entries may be added."""
        with to_be_saved(checkpoint, self, "before_save_checkpoint") as lent:
            self._call(engine, "before_save_checkpoint", checkpoint=lent)

    def after_load_checkpoint(self, engine: Engine, checkpoint: dict[str, Any]) -> None:
        """MMEngine's after_load_checkpoint; hydraloop's entries are loaded already and cannot be changed."""
        with loaded(checkpoint, self, "after_load_checkpoint") as lent:
            self._call(engine, "after_load_checkpoint", checkpoint=lent)

    # Training. -----------------------------------------------------------------------------------------------------

    def before_train(self, engine: Engine) -> None:
        """MMEngine's before_train."""
        self._call(engine, "before_train")

    def after_train(self, engine: Engine) -> None:
        """MMEngine's after_train; not after an error."""
        if engine.error is None:
            self._call(engine, "after_train")

    def before_train_epoch(self, engine: Engine) -> None:
        """MMEngine's before_train_epoch."""
        self._call(engine, "before_train_epoch")

    def after_train_epoch(self, engine: Engine) -> None:
        """MMEngine's after_train_epoch."""
        self._call(engine, "after_train_epoch")

    def before_train_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """MMEngine's before_train_iter."""
        self._call(engine, "before_train_iter", batch_idx=batch_idx, data_batch=batch)

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """MMEngine's after_train_iter."""
        self._runner_of(engine).message_hub.see(outputs)
        self._call(engine, "after_train_iter", batch_idx=batch_idx, data_batch=batch, outputs=outputs)

    # Validation and test. ------------------------------------------------------------------------------------------

    def before_val(self, engine: Engine) -> None:
        """MMEngine's before_val."""
        self._call(engine, "before_val")

    def after_val(self, engine: Engine) -> None:
        """MMEngine's after_val; the model is in evaluation mode."""
        with in_eval_mode(engine.task):
            self._call(engine, "after_val")

    def before_val_epoch(self, engine: Engine) -> None:
        """MMEngine's before_val_epoch."""
        self._call(engine, "before_val_epoch")

    def after_val_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """MMEngine's after_val_epoch; the model is in evaluation mode."""
        with in_eval_mode(engine.task):
            self._call(engine, "after_val_epoch", metrics=dict(metrics))

    def before_val_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """MMEngine's before_val_iter."""
        self._call(engine, "before_val_iter", batch_idx=batch_idx, data_batch=batch)

    def after_val_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """MMEngine's after_val_iter."""
        self._call(engine, "after_val_iter", batch_idx=batch_idx, data_batch=batch, outputs=outputs)

    def before_test(self, engine: Engine) -> None:
        """MMEngine's before_test."""
        self._call(engine, "before_test")

    def after_test(self, engine: Engine) -> None:
        """MMEngine's after_test; the model is in evaluation mode."""
        with in_eval_mode(engine.task):
            self._call(engine, "after_test")

    def before_test_epoch(self, engine: Engine) -> None:
        """MMEngine's before_test_epoch."""
        self._call(engine, "before_test_epoch")

    def after_test_epoch(self, engine: Engine, metrics: Mapping[str, float]) -> None:
        """MMEngine's after_test_epoch; the model is in evaluation mode."""
        with in_eval_mode(engine.task):
            self._call(engine, "after_test_epoch", metrics=dict(metrics))

    def before_test_iter(self, engine: Engine, batch_idx: int, batch: Any) -> None:
        """MMEngine's before_test_iter."""
        self._call(engine, "before_test_iter", batch_idx=batch_idx, data_batch=batch)

    def after_test_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """MMEngine's after_test_iter."""
        self._call(engine, "after_test_iter", batch_idx=batch_idx, data_batch=batch, outputs=outputs)

    # State. --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The hook's own."""
        state: dict[str, Any] = self.wrapped.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Hand the hook its own state."""
        self.wrapped.load_state_dict(state)

    # Within. -------------------------------------------------------------------------------------------------------

    def _runner_of(self, engine: Engine) -> Runner:
        """The runner that all adapted hooks of the engine share, kept by the first of them."""
        if self._runner is None or self._runner.context.engine is not engine:
            first = next(hook for hook in engine.hooks.values() if isinstance(hook, MMEngineHook))
            if first._runner is None or first._runner.context.engine is not engine:
                first._runner = Runner(Context(engine))
            self._runner = first._runner
        return self._runner

    def _call(self, engine: Engine, point: str, **arguments: Any) -> None:
        runner = self._runner_of(engine)
        runner.context.call(self, point, runner, **arguments)
