"""MMEngineHook: a hook written for MMEngine, at the same mount points."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hydraloop.compat.adapter import Adapter, check_object, lent, overridden
from hydraloop.compat.mmengine_runner import Runner
from hydraloop.engine.engine import Engine
from hydraloop.engine.evaluation.module_modes import in_eval_mode
from hydraloop.engine.hook import GENERAL_POINTS, MOUNT_POINTS, Priority
from hydraloop.errors import UserError, suggestion

_BASES = ("mmengine.hooks.hook",)
_ADDED = ("at_position", "after_backward", "before_optimizer_step", "on_log", "on_exception")
_POINTS = tuple(point for point in MOUNT_POINTS if point not in _ADDED)
"""MMEngine's 22 mount points, all of which hydraloop has."""
_IN_EVAL_MODE = ("after_val_epoch", "after_val", "after_test_epoch", "after_test")
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
"""MMEngine's own hooks that are not supported, and what to use instead."""


class MMEngineHook(Adapter):
    """Runs an mmengine hook object: `MMEngineHook(EmptyCacheHook(after_epoch=True))`.

    All 22 mount points of MMEngine are supported, with its arguments (`batch_idx`, `data_batch`, `outputs`, `metrics`,
    `checkpoint`), and also `_before_epoch` and the like, its helpers (`every_n_train_iters`, `end_of_epoch`, …) and its
    priority. `mmengine_runner.py` lists the attributes of `runner`; they cannot be replaced.

    Of MMEngine's own hooks, EarlyStoppingHook, EmptyCacheHook, SyncBuffersHook, IterTimerHook, DistSamplerSeedHook and
    ProfilerHook work. The others are rejected, with the option to use instead.

    Differences from MMEngine, besides those of `Adapter`:

    * `data_batch` is on the device. The tensors of `outputs` are detached; in validation and test, `outputs` is what
      the task's `evaluate` returned.
    * In before_save_checkpoint and after_load_checkpoint, iter and epoch count completed ones.
    * after_load_checkpoint is called after the weights are loaded: to change them, change runner.model.
    * mmengine's global MessageHub is not the hub of this run.

    Mount points: those that the hook's class uses. As in MMEngine, after_train and after_run are not called after an
    error. Priority and state: the hook's own. (MMEngine itself saves no state.)

    Args:
        hook: an object of a class derived from mmengine's `Hook`, or with such methods.

    Raises:
        UserError: it is not a hook, has a mount point that MMEngine does not have (MMCV's `before_epoch`), or is one of
            MMEngine's own that is not supported.
    """

    stand_in = Runner

    def __init__(self, hook: Any) -> None:
        check_object(hook, ("mmengine",), INSTEAD, "hook", "an mmengine hook")
        own, kind = overridden(hook, _BASES), type(hook).__name__
        for name in own:
            if name.startswith(("before_", "after_")) and name not in _POINTS:
                raise UserError(
                    f"{kind}.{name} is not a mount point of MMEngine",
                    key="hook",
                    remedy=suggestion(name, _POINTS) + " Rewrite a hook of MMCV 1 for MMEngine first.",
                )
        used = {point for point in own if point in _POINTS}
        for general, points in GENERAL_POINTS.items():
            if f"_{general}" in own:
                used.update(point for point, _ in points if hasattr(hook, point))
        if not used:
            raise UserError(f"{kind} has none of MMEngine's mount points", key="hook", remedy=", ".join(_POINTS))
        self.wrapped = hook
        made = {point: _calling(point) for point in used}
        self._restrict(used, made, state="state_dict" in own, priority=getattr(hook, "priority", Priority.NORMAL))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Give the hook its state."""
        self.wrapped.load_state_dict(state)

    def _call(self, engine: Engine, point: str, **arguments: Any) -> None:
        runner: Runner = self._stand_in_of(engine)
        self._invoke(runner.context, point, runner, **arguments)


def _calling(point: str) -> Callable[..., None]:
    """Make the method that calls MMEngine's at a mount point, with MMEngine's argument names."""

    def with_a_checkpoint(self: MMEngineHook, engine: Engine, checkpoint: dict[str, Any]) -> None:
        with lent(checkpoint, self, point, saving=point == "before_save_checkpoint") as copied:
            self._call(engine, point, checkpoint=copied)

    def at_a_point(self: MMEngineHook, engine: Engine) -> None:
        if engine.error is None or point not in ("after_train", "after_run"):
            self._call(engine, point)

    def after_an_evaluation(self: MMEngineHook, engine: Engine, *metrics: Any) -> None:
        with in_eval_mode(engine.task):
            self._call(engine, point, **({"metrics": dict(metrics[0])} if metrics else {}))

    def before_an_iteration(self: MMEngineHook, engine: Engine, batch_idx: int, batch: Any) -> None:
        self._call(engine, point, batch_idx=batch_idx, data_batch=batch)

    def after_an_iteration(self: MMEngineHook, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        if point == "after_train_iter":
            self._stand_in_of(engine).message_hub.keep_outputs(outputs)
        self._call(engine, point, batch_idx=batch_idx, data_batch=batch, outputs=outputs)

    if point.endswith("_checkpoint"):
        return with_a_checkpoint
    if point.endswith("_iter"):
        return before_an_iteration if point.startswith("before_") else after_an_iteration
    return after_an_evaluation if point in _IN_EVAL_MODE else at_a_point
