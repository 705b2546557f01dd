"""Default and custom hooks. Names are imported when they are first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hydraloop.schemas.selected_hooks import HOOK_CLASSES

if TYPE_CHECKING:
    from hydraloop.hooks.check_invalid_loss import AnomalyDetectionHook as AnomalyDetectionHook
    from hydraloop.hooks.check_invalid_loss import CheckInvalidLossHook as CheckInvalidLossHook
    from hydraloop.hooks.checkpoint import CheckpointHook as CheckpointHook
    from hydraloop.hooks.early_stopping import EarlyStoppingHook as EarlyStoppingHook
    from hydraloop.hooks.ema import EMAHook as EMAHook
    from hydraloop.hooks.epoch_start import DistSamplerSeedHook as DistSamplerSeedHook
    from hydraloop.hooks.epoch_start import ModeSwitchHook as ModeSwitchHook
    from hydraloop.hooks.epoch_start import SetEpochInfoHook as SetEpochInfoHook
    from hydraloop.hooks.freeze import FreezeHook as FreezeHook
    from hydraloop.hooks.grad_clip import GradClipHook as GradClipHook
    from hydraloop.hooks.logger import LoggerHook as LoggerHook
    from hydraloop.hooks.memory import EmptyCacheHook as EmptyCacheHook
    from hydraloop.hooks.memory import MemoryProfilerHook as MemoryProfilerHook
    from hydraloop.hooks.num_class_check import NumClassCheckHook as NumClassCheckHook
    from hydraloop.hooks.param_scheduler import ParamSchedulerHook as ParamSchedulerHook
    from hydraloop.hooks.profiler import ProfilerHook as ProfilerHook
    from hydraloop.hooks.progress import ProgressHook as ProgressHook
    from hydraloop.hooks.runtime_info import RuntimeInfoHook as RuntimeInfoHook
    from hydraloop.hooks.sync_buffers import SyncBuffersHook as SyncBuffersHook
    from hydraloop.hooks.sync_random_size import SyncRandomSizeHook as SyncRandomSizeHook
    from hydraloop.hooks.timer import IterTimerHook as IterTimerHook
    from hydraloop.hooks.trackers import MLflowLoggerHook as MLflowLoggerHook
    from hydraloop.hooks.trackers import TensorBoardLoggerHook as TensorBoardLoggerHook
    from hydraloop.hooks.trackers import WandbLoggerHook as WandbLoggerHook
    from hydraloop.hooks.tta import TestTimeAugmentationHook as TestTimeAugmentationHook
    from hydraloop.hooks.visualization import VisualizationHook as VisualizationHook

__all__ = sorted(HOOK_CLASSES)


def __getattr__(name: str) -> Any:
    if name not in HOOK_CLASSES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(HOOK_CLASSES[name]["module"]), name)


def __dir__() -> list[str]:
    return __all__
