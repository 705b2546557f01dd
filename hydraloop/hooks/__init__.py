"""Default and custom hooks, one file each. Names are imported when they are first used.

A hook's option name, class and file: `ema` is `EMAHook` in `ema.py`.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hydraloop.hooks.checkpoint import CheckpointHook as CheckpointHook
    from hydraloop.hooks.ema import EMAHook as EMAHook
    from hydraloop.hooks.grad_clip import GradClipHook as GradClipHook
    from hydraloop.hooks.logger import LoggerHook as LoggerHook
    from hydraloop.hooks.param_scheduler import ParamSchedulerHook as ParamSchedulerHook
    from hydraloop.hooks.profiler import ProfilerHook as ProfilerHook
    from hydraloop.hooks.progress import ProgressHook as ProgressHook
    from hydraloop.hooks.runtime_info import RuntimeInfoHook as RuntimeInfoHook
    from hydraloop.hooks.sampler_seed import DistSamplerSeedHook as DistSamplerSeedHook
    from hydraloop.hooks.timer import IterTimerHook as IterTimerHook

_FILES = {
    "CheckpointHook": "checkpoint",
    "DistSamplerSeedHook": "sampler_seed",
    "EMAHook": "ema",
    "GradClipHook": "grad_clip",
    "IterTimerHook": "timer",
    "LoggerHook": "logger",
    "ParamSchedulerHook": "param_scheduler",
    "ProfilerHook": "profiler",
    "ProgressHook": "progress",
    "RuntimeInfoHook": "runtime_info",
}
__all__ = sorted(_FILES)


def __getattr__(name: str) -> Any:
    if name not in _FILES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_FILES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
