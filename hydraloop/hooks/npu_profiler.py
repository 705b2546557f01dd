"""NPUProfilerHook: what ProfilerHook does, with the profiler of Ascend's NPUs."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Priority
from hydraloop.errors import UserError
from hydraloop.hooks.profiler import FOLDER, SCHEDULE, ProfilerHook, TraceHandler
from hydraloop.run.environment import shown

log = logging.getLogger(__name__)


class NPUProfilerHook(ProfilerHook):
    """Profiles training with `torch_npu.profiler`: CPU and NPU time and memory of each operator.

    It works like `ProfilerHook`, with these differences. The recording is in `<run_dir>/tf_tracing_logs/…_ascend_pt`,
    where `tb_trace` lets torch_npu analyse it for MindStudio Insight and TensorBoard's Ascend plug-in. `chrome_trace`
    writes a Chrome trace. There is no table (`log_trace`), because torch_npu has none. If the package `torch_npu`
    cannot be imported, the run ends with an error before training.

    Priority VERY_LOW, MMEngine's. Runs on rank 0 only. Cost: one host sync at the end of a cycle, followed by the
    analysis, none otherwise. No state. Options: `NPUProfilerHookConf`. MMEngine's NPUProfilerHook uses an older
    interface of torch_npu (`torch_npu.npu.profile`); its `begin` and `end` correspond to `schedule`, its `result_path`
    to the run directory. Here, the run continues after profiling.

    Raises:
        UserError: torch_npu is missing, an option is out of range, or the run is too short to record anything.
    """

    priority = Priority.VERY_LOW
    _names = ("tb_trace", "chrome_trace")
    _device_option = "activity_with_npu"

    def __init__(
        self,
        *,
        by_epoch: bool = True,
        profile_times: int = 1,
        activity_with_cpu: bool = True,
        activity_with_npu: bool | None = None,
        schedule: Mapping[str, int] | None = SCHEDULE,
        on_trace_ready: str | TraceHandler | Iterable[str | TraceHandler] | None = "tb_trace",
        record_shapes: bool = False,
        profile_memory: bool = True,
        with_stack: bool = False,
        with_flops: bool = False,
        json_trace_path: str | None = None,
    ) -> None:
        super().__init__(
            by_epoch=by_epoch,
            profile_times=profile_times,
            activity_with_cpu=activity_with_cpu,
            activity_with_cuda=activity_with_npu,
            schedule=schedule,
            on_trace_ready=on_trace_ready,
            record_shapes=record_shapes,
            profile_memory=profile_memory,
            with_stack=with_stack,
            with_flops=with_flops,
            json_trace_path=json_trace_path,
        )
        self._analyse: TraceHandler | None = None

    def before_run(self, engine: Engine) -> None:
        """Reject a run without torch_npu, and what ProfilerHook rejects."""
        try:
            self._profiling()
        except ImportError as error:
            raise UserError(
                f"torch_npu cannot be imported: {error}",
                key=self.key,
                remedy="Install torch-npu (it needs Ascend's CANN), or use hooks=profiler for other devices.",
            ) from error
        super().before_run(engine)

    def before_train(self, engine: Engine) -> None:
        """Start the profiler."""
        folder = engine.run_dir / FOLDER
        # Before the profiler starts, because torch_npu records into this folder, else into the working directory.
        self._analyse = self._profiling().tensorboard_trace_handler(
            str(folder.absolute()), analyse_flag="tb_trace" in self._handlers
        )
        super().before_train(engine)

    def _profiling(self) -> Any:
        return importlib.import_module("torch_npu.profiler")

    def _device_activity(self, device_type: str) -> Any:
        return self._profiling().ProfilerActivity.NPU

    def _tensorboard_trace(self, engine: Engine, trace: Any) -> None:
        assert self._analyse is not None, "set in before_train"
        self._analyse(trace)
        log.info(
            "profile up to iteration %d: in %s\n  open it in MindStudio Insight, or: pip install "
            "torch-tb-profiler-ascend; tensorboard --logdir that folder",
            engine.progress.iteration,
            shown(engine.run_dir / FOLDER),
        )
