"""Hooks under the class names that the configs of earlier runs have."""

from __future__ import annotations

from typing import Any

from hydraloop.hooks.profiler import ProfilerHook
from hydraloop.hooks.sync_buffers import SyncBuffersHook


class NPUProfilerHook(ProfilerHook):
    """`ProfilerHook` with the defaults of `hooks=npu_profiler`."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"activity_with_npu": None, "on_trace_ready": "tb_trace", **options})


class SyncNormHook(SyncBuffersHook):
    """`SyncBuffersHook` with the defaults of `hooks=sync_norm`."""

    def __init__(self) -> None:
        super().__init__(norm_only=True)
