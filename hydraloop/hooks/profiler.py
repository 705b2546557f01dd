"""ProfilerHook: shows the time and memory of each operator in a few iterations."""

from __future__ import annotations

import importlib
import logging
import os
import shutil
import socket
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Priority
from hydraloop.errors import UserError
from hydraloop.files.environment import shown
from hydraloop.schemas.option_checks import check_at_least, names_or_callables

if TYPE_CHECKING:
    from torch.profiler import profile

log = logging.getLogger(__name__)

TraceHandler = Callable[[Any], object]

_NAMES = ("tb_trace", "chrome_trace", "log_trace")
"""Names of the handlers. torch_npu has no table to log."""

SCHEDULE = {"wait": 1, "warmup": 1, "active": 3, "repeat": 1, "skip_first": 0}
_ON_TRACE_READY = ["tb_trace", "log_trace"]
FOLDER = "tf_tracing_logs"
"""Folder of the traces in the run directory; MMEngine's name."""


class ProfilerHook(Hook):
    """Profiles training with `torch.profiler`: CPU and device time and memory of each operator.

    On Ascend NPUs, `hooks=npu_profiler` (`activity_with_npu`) uses `torch_npu.profiler`. If the package cannot be
    imported, the run ends with an error before training. The recording is in `<run_dir>/tf_tracing_logs/…_ascend_pt`,
    where `tb_trace` lets torch_npu analyse it for MindStudio Insight and TensorBoard's Ascend plug-in. There is no
    table (`log_trace`), because torch_npu has none.

    The profiler starts when training starts in this process, and steps with each iteration. It stops after
    `profile_times` epochs (or iterations), when the schedule's cycles are done, or when training ends. A validation in
    between is in the trace. At the end of each cycle, the trace is passed to `on_trace_ready`:

    * `tb_trace`: writes a Chrome trace `<run_dir>/tf_tracing_logs/<host>_<process>.<time>.pt.trace.json`, which
      https://ui.perfetto.dev opens (on an NPU, TensorBoard with torch-tb-profiler-ascend);
    * `chrome_trace`: writes the same trace to `json_trace_path`;
    * `log_trace`: writes a table to the log, sorted by the time spent in the operator itself;
    * anything callable with a `torch.profiler.profile` (a `_target_` in the config). torch exports a trace only once: a
      handler that calls `export_chrome_trace` excludes `tb_trace` and `chrome_trace`;
    * a list of these, called in order.

    Priority VERY_LOW, MMEngine's: a profiler step then includes the work of other hooks. Runs on rank 0 only, as in
    MMEngine. Cost: one host sync at the end of a cycle, none otherwise; an iteration may take several times longer
    during warm-up and recording; starting takes about two seconds (torch imports its compiler). No state: a resumed run
    is profiled again. Options: `ProfilerHookConf`. Names and meaning are MMEngine's, whose NPUProfilerHook uses an
    older interface of torch_npu: its `begin` and `end` correspond to `schedule`, and its `result_path` to the run
    directory.

    Raises:
        UserError: an option is out of range, or (in before_run) torch_npu is missing.
    """

    priority = Priority.VERY_LOW
    on_error = "warn"
    rank_zero_only = True

    def __init__(
        self,
        *,
        by_epoch: bool = True,
        profile_times: int = 1,
        activity_with_cpu: bool = True,
        activity_with_cuda: bool | None = None,
        activity_with_npu: bool | None = False,
        schedule: Mapping[str, int] | None = SCHEDULE,
        on_trace_ready: str | TraceHandler | Iterable[str | TraceHandler] | None = _ON_TRACE_READY,
        record_shapes: bool = False,
        profile_memory: bool = True,
        with_stack: bool = False,
        with_flops: bool = False,
        json_trace_path: str | None = None,
        row_limit: int = 20,
    ) -> None:
        check_at_least(1, profile_times=profile_times, row_limit=row_limit)
        if json_trace_path is not None:
            _check_place(json_trace_path)
        self._by_epoch = by_epoch
        self._times = profile_times
        self._with_cpu = activity_with_cpu
        self._on_npu = activity_with_npu is not False
        self._with_device = activity_with_npu if self._on_npu else activity_with_cuda
        self._schedule = None if schedule is None else {**SCHEDULE, **schedule}
        names = _NAMES[:2] if self._on_npu else _NAMES
        self._handlers = names_or_callables("on_trace_ready", on_trace_ready or (), names, "trace handler")
        if json_trace_path is not None and "chrome_trace" not in self._handlers:
            self._handlers.append("chrome_trace")
        self._json_path = json_trace_path or f"{FOLDER}/chrome_trace.json"
        self._row_limit = row_limit
        self._recorded = {
            "record_shapes": record_shapes,
            "profile_memory": profile_memory,
            "with_stack": with_stack,
            "with_flops": with_flops,
        }
        self._profile: profile | None = None
        self._analyse: TraceHandler | None = None
        """Handler of torch_npu."""
        self._left = 0
        """Iterations until the profiler stops."""
        self._traces = 0
        self._failed: Exception | None = None
        self._written: Path | None = None

    def before_run(self, engine: Engine) -> None:
        """Reject a run on an NPU without torch_npu."""
        try:
            self._profiling()
        except ImportError as error:
            raise UserError(
                f"torch_npu cannot be imported: {error}",
                key=self.key,
                remedy="Install torch-npu (it needs Ascend's CANN), or use hooks=profiler for other devices.",
            ) from error

    def before_train(self, engine: Engine) -> None:
        """Start the profiler."""
        profiling = self._profiling()
        # Without this, torch 2.13 prints a line at each start and stop.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        if self._on_npu:
            # Before the profiler starts, because torch_npu records into this folder, else into the working directory.
            self._analyse = profiling.tensorboard_trace_handler(
                str((engine.run_dir / FOLDER).absolute()), analyse_flag="tb_trace" in self._handlers
            )
        activities = [profiling.ProfilerActivity.CPU] if self._with_cpu else []
        if self._with_device or (self._with_device is None and engine.device.type != "cpu"):
            activities.append(self._device_activity(engine.device.type))
        self._left = self._times
        if self._by_epoch:
            self._left = self._times * engine.progress.epoch_length - engine.progress.batch_in_epoch
        if self._schedule is not None and self._schedule["repeat"]:
            cycle = self._schedule["wait"] + self._schedule["warmup"] + self._schedule["active"]
            self._left = min(self._left, self._schedule["skip_first"] + cycle * self._schedule["repeat"])
        always = profiling.ProfilerAction.RECORD
        profiler = profiling.profile(
            activities=activities,
            # With any schedule, torch marks the iterations in the trace.
            schedule=(lambda _: always) if self._schedule is None else profiling.schedule(**self._schedule),
            on_trace_ready=lambda trace: self._ready(engine, trace),
            **self._recorded,
        )
        profiler.start()
        self._profile = profiler

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        self._left -= 1
        self._advance(stop=self._left <= 0)

    def after_train(self, engine: Engine) -> None:
        """Stop if training ended or failed before; the handlers get what was recorded."""
        self._advance(stop=True)

    # Within. ---------------------------------------------------------------------------------------------------------

    def _profiling(self) -> Any:
        """Return the module with `profile`, `schedule`, `ProfilerAction` and `ProfilerActivity`."""
        return importlib.import_module("torch_npu.profiler" if self._on_npu else "torch.profiler")

    def _device_activity(self, device_type: str) -> Any:
        """Return the activity of an accelerator: CUDA (also ROCm), XPU, NPU, or PrivateUse1 for others."""
        known = self._profiling().ProfilerActivity
        if self._on_npu:
            return known.NPU
        return {"cuda": known.CUDA, "xpu": known.XPU}.get(device_type, known.PrivateUse1)

    def _tensorboard_trace(self, engine: Engine, trace: profile) -> None:
        """Write the trace to the folder and name that TensorBoard expects; on an NPU, let torch_npu analyse it."""
        if self._analyse is None:
            name = f"{socket.gethostname()}_{os.getpid()}.{time.time_ns()}.pt.trace.json"
            self._write(engine, trace, engine.run_dir / FOLDER / name)
            return
        self._analyse(trace)
        log.info("profile up to iteration %d: in %s", engine.progress.iteration, shown(engine.run_dir / FOLDER))

    def _advance(self, *, stop: bool) -> None:
        """Step or stop the profiler, if it is running; raise the error of a handler."""
        # None in the meantime: torch crashes if a profiler is stopped twice, or used again after an exception inside it
        # (a Ctrl-C while the trace is written).
        profiler, self._profile = self._profile, None
        if profiler is None:
            return
        if stop:
            profiler.stop()
            if not self._traces:
                log.warning("%s: profiling ended before an iteration was recorded; there is no trace", self.key)
        else:
            with warnings.catch_warnings():
                # torch warns that each cycle has only its own events, which is intended.
                warnings.filterwarnings("ignore", message="Warning: Profiler clears events", category=UserWarning)
                profiler.step()
            self._profile = profiler
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def _ready(self, engine: Engine, trace: profile) -> None:
        """Pass a recorded cycle to the handlers. torch calls this inside a step; an error is raised after the step."""
        self._traces += 1
        self._written = None
        own = {"tb_trace": self._tensorboard_trace, "chrome_trace": self._chrome_trace, "log_trace": self._log_table}
        try:
            for handler in self._handlers:
                if callable(handler):
                    handler(trace)
                else:
                    own[handler](engine, trace)
        except Exception as error:
            self._failed = error

    def _chrome_trace(self, engine: Engine, trace: profile) -> None:
        self._write(engine, trace, engine.run_dir / self._json_path)

    def _write(self, engine: Engine, trace: profile, path: Path) -> None:
        """Write the trace; torch exports it only once, so a second file is a copy."""
        path.parent.mkdir(parents=True, exist_ok=True)
        if self._written is None:
            trace.export_chrome_trace(str(path))
            self._written = path
        else:
            shutil.copyfile(self._written, path)
        log.info(
            "profile up to iteration %d: %s; open it in chrome://tracing or https://ui.perfetto.dev",
            engine.progress.iteration, shown(path),
        )  # fmt: skip

    def _log_table(self, engine: Engine, trace: profile) -> None:
        averages = trace.key_averages()
        by_device = any(event.self_device_time_total for event in averages)
        sort_by = "self_device_time_total" if by_device else "self_cpu_time_total"
        table = averages.table(sort_by=sort_by, row_limit=self._row_limit)
        log.info("profile up to iteration %d, sorted by %s\n%s", engine.progress.iteration, sort_by, table)


def _check_place(path: str) -> None:
    is_inside = not Path(path).is_absolute() and ".." not in Path(path).parts
    if not (is_inside and path.endswith((".json", ".json.gz"))):
        remedy = "Name one that ends in .json or .json.gz, relative to the run directory: trace.json."
        raise UserError(f"{path} is no trace in the run directory", key="json_trace_path", remedy=remedy)
