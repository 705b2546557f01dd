"""Options of the hooks that observe a run: runtime_info, timer, logger, progress (default hooks), three profilers."""

from dataclasses import dataclass, field
from typing import Any, Dict, Optional, Union

from hydra.core.config_store import ConfigStore

from hydraloop.schemas.hook import HookConf, store_hooks


@dataclass
class RuntimeInfoHookConf(HookConf):
    """Puts epoch, iteration, lr, momentum, losses and metrics into `engine.messages`."""

    _target_: str = "hydraloop.hooks.RuntimeInfoHook"


@dataclass
class IterTimerHookConf(HookConf):
    """Measures the time of each iteration and its wait for data, estimates the time left, and prints statistics."""

    _target_: str = "hydraloop.hooks.IterTimerHook"


@dataclass
class LoggerHookConf(HookConf):
    """Writes records of the run to the terminal, to `metrics.jsonl` and to trackers."""

    _target_: str = "hydraloop.hooks.LoggerHook"
    interval: Optional[int] = 10
    """Iterations between two records of training. 10, as in MMEngine. Null: records of validation and test only."""
    ignore_last: bool = True
    """Whether the iterations left at the end of an epoch, fewer than `interval`, become part of the next record (as in
    MMEngine). False: they get their own record."""


@dataclass
class ProgressHookConf(HookConf):
    """Shows a progress bar in the terminal."""

    _target_: str = "hydraloop.hooks.ProgressHook"
    on_error: Optional[str] = "warn"
    enabled: Union[bool, str] = "auto"
    """`auto`: only if standard output is a terminal, so that files, pipes and notebooks contain lines only. True:
    always. False: never."""
    refresh_per_second: float = 10
    """Maximum number of updates per second. 10 looks smooth and costs about 1 % of one core."""


@dataclass
class ProfilerHookConf(HookConf):
    """Profiles a few iterations with torch.profiler: a trace file, and a table in the log."""

    _target_: str = "hydraloop.hooks.ProfilerHook"
    on_error: Optional[str] = "warn"
    by_epoch: bool = True
    """Whether `profile_times` counts epochs (MMEngine's default) or iterations."""
    profile_times: int = 1
    """Epochs or iterations after which profiling ends at the latest, at least 1. 1, as in MMEngine: epochs are
    alike."""
    activity_with_cpu: bool = True
    """Record the host's operators. True, as in MMEngine: a trace without them shows no causes."""
    activity_with_cuda: Optional[bool] = None
    """Record the accelerator's kernels. Null: if the run uses one. (MMEngine's default, false, hides them.)"""
    activity_with_npu: Optional[bool] = False
    """Profile with torch_npu.profiler, and record the kernels of an Ascend NPU: true, or null for a run that may use
    the CPU. False: with torch.profiler, which every machine has."""
    schedule: Optional[Dict[str, int]] = field(
        default_factory=lambda: {"wait": 1, "warmup": 1, "active": 3, "repeat": 1, "skip_first": 0}
    )
    """Iterations, as in `torch.profiler.schedule`: leave out `skip_first`, then `repeat` times (0: until the end) leave
    out `wait`, discard `warmup` and record `active`. A name that is left out has its default. The first iterations
    include start-up costs, and three show the pattern in a trace that viewers can open. Null, MMEngine's default,
    records everything."""
    on_trace_ready: Any = field(default_factory=lambda: ["tb_trace", "log_trace"])
    """What to do with a trace: `tb_trace`, `chrome_trace`, `log_trace`, or a mapping with `_target_`
    (`[{_target_: …}]`), as a list or one name alone. Null, MMEngine's default: nothing. The default writes a file for
    TensorBoard and Chrome, and a table to the log for users without a viewer."""
    record_shapes: bool = False
    """Record input shapes. False, as in MMEngine: it makes every operator slower."""
    profile_memory: bool = True
    """Record allocations. True, because memory is often what people profile for. (MMEngine: false.)"""
    with_stack: bool = False
    """Record file and line of each operator. False, as in MMEngine: it is slow and makes large traces."""
    with_flops: bool = False
    """Estimate the FLOPs of matrix products and 2D convolutions. False, as in MMEngine: few users need it."""
    json_trace_path: Optional[str] = None
    """Where `chrome_trace` writes, relative to the run directory; a path adds `chrome_trace` to `on_trace_ready`. Each
    cycle overwrites the file. A path outside the run directory must be given on the command line. Null, as in
    MMEngine: `tf_tracing_logs/chrome_trace.json` if `chrome_trace` is used."""
    row_limit: int = 20
    """Rows of the table, at least 1. 20 fit on a screen."""


@dataclass
class NPUProfilerHookConf(ProfilerHookConf):
    """Profiles a few iterations on Ascend NPUs with torch_npu.profiler."""

    activity_with_npu: Optional[bool] = None
    """Record the NPU's kernels: true, or null for a run that may use the CPU. False: profile with torch.profiler."""
    on_trace_ready: Any = "tb_trace"
    """What to do with a trace: `tb_trace`, `chrome_trace`, or a mapping with `_target_`, as a list or one name alone.
    Null: nothing. The default writes a folder for MindStudio Insight and TensorBoard's Ascend plug-in; torch_npu has
    no table to log."""


@dataclass
class MemoryProfilerHookConf(HookConf):
    """Reports the memory of the machine, the process and the device, in the log and in records."""

    _target_: str = "hydraloop.hooks.MemoryProfilerHook"
    on_error: Optional[str] = "warn"
    interval: int = 50
    """Iterations of training, or batches of an evaluation, between two reports, at least 1. 50, as in MMDetection."""


def register(store: ConfigStore) -> None:
    """Store the default hooks in the group `default_hooks`, the profilers in `hooks`."""
    store_hooks(
        store,
        "default_hooks",
        runtime_info=RuntimeInfoHookConf,
        timer=IterTimerHookConf,
        logger=LoggerHookConf,
        progress=ProgressHookConf,
    )
    store_hooks(
        store, profiler=ProfilerHookConf, npu_profiler=NPUProfilerHookConf, memory_profiler=MemoryProfilerHookConf
    )
