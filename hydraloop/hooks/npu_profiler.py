"""NPUProfilerHook: what ProfilerHook does, with the profiler of Ascend's NPUs."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from hydraloop.engine.hook import Priority
from hydraloop.engine.report.summary import shown
from hydraloop.errors import UserError
from hydraloop.hooks.profiler import FOLDER, SCHEDULE, ProfilerHook, TraceHandler

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)


class NPUProfilerHook(ProfilerHook):
    """Profiles training with `torch_npu.profiler`: CPU and NPU time and memory of each operator.

    As `ProfilerHook`, with these differences. What is recorded lies in `<run_dir>/tf_tracing_logs/…_ascend_pt`, where
    `tb_trace` has torch_npu analyse it, for MindStudio Insight and TensorBoard's Ascend plug-in. `chrome_trace` writes
    a Chrome trace. There is no table (`log_trace`), since torch_npu makes none. The package `torch_npu` is needed;
    where it cannot be imported, that is an error before the run.

    Mount points: before_run, before_train, after_train_iter, after_train. Priority VERY_LOW, MMEngine's. On rank 0
    only. One device sync at the end of a cycle, where the analysis takes its time, none otherwise. No state. It warns.
    MMEngine's NPUProfilerHook uses an older interface of torch_npu (`torch_npu.npu.profile`); its `begin` and `end` are
    `schedule` here, its `result_path` is the run directory's, and the run goes on afterwards.

    Args:
        by_epoch: whether `profile_times` counts epochs; else iterations.
        profile_times: epochs or iterations after which profiling ends.
        activity_with_cpu: record the host's operators.
        activity_with_npu: record the NPU's kernels; None: where the run is on one.
        schedule: in iterations; see `ProfilerHook`. None records everything.
        on_trace_ready: `tb_trace`, `chrome_trace`, something callable with the profile, a list of them; None: nothing.
        record_shapes: record the operators' input shapes.
        profile_memory: record allocations.
        with_stack: record file and line of each operator; slow.
        with_flops: estimate FLOPs.
        json_trace_path: where `chrome_trace` writes; see `ProfilerHook`.

    Raises:
        UserError: torch_npu is missing, an option cannot be, or the run is too short to record anything.
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
        """Refuse a run without torch_npu, and what ProfilerHook refuses."""
        try:
            self._profiling()
        except ImportError as error:
            raise UserError(
                f"torch_npu cannot be imported: {error}",
                key=self.key,
                remedy="Install torch-npu (it needs Ascend's CANN), or use hooks=profiler, which is for other devices.",
            ) from error
        super().before_run(engine)

    def before_train(self, engine: Engine) -> None:
        """Start the profiler."""
        folder = engine.run_dir / FOLDER
        # Made before the profiler starts: it tells torch_npu where to record, which is the working directory otherwise.
        self._analyse = self._profiling().tensorboard_trace_handler(
            str(folder.absolute()), analyse_flag="tb_trace" in self._handlers
        )
        super().before_train(engine)

    def _profiling(self) -> Any:
        return importlib.import_module("torch_npu.profiler")

    def _device_activity(self, device_type: str) -> Any:
        return self._profiling().ProfilerActivity.NPU

    def _tensorboard_trace(self, engine: Engine, trace: Any) -> None:
        assert self._analyse is not None, "made in before_train"
        self._analyse(trace)
        log.info(
            "profile up to iteration %d: in %s\n  open it in MindStudio Insight, or: pip install "
            "torch-tb-profiler-ascend; tensorboard --logdir that folder",
            engine.progress.iteration,
            shown(engine.run_dir / FOLDER),
        )
