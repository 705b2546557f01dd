"""Options of the hooks that watch a run: runtime_info, timer, logger, progress (default hooks), the two profilers."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Dict, Optional, Tuple, Union

from hydra.core.config_store import ConfigStore


@dataclass
class RuntimeInfoHookConf:
    """Epoch, iteration, lr, momentum, losses and metrics in `engine.messages`."""

    default_priority: ClassVar[int] = 10
    mount_points: ClassVar[Tuple[str, ...]] = ("before_run", "before_train", "after_train_iter", "after_val_epoch")
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.RuntimeInfoHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: VERY_HIGH, MMEngine's, since others read what it tells."""
    on_error: Optional[str] = "raise"
    """`raise`, `warn` or `disable`; a run without these numbers would log nothing, so they are worth ending it."""


@dataclass
class IterTimerHookConf:
    """Time of each iteration, its wait for data, the time left, and statistics at the end."""

    default_priority: ClassVar[int] = 50
    mount_points: ClassVar[Tuple[str, ...]] = (
        "before_run",
        "before_train_epoch",
        "after_train_iter",
        "before_save_checkpoint",
        "before_val",
    )
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.IterTimerHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: NORMAL, MMEngine's."""
    on_error: Optional[str] = "raise"
    """`raise`, `warn` or `disable`; it only reads a clock: an error in it is a bug to see."""


@dataclass
class LoggerHookConf:
    """Records of the run: to the terminal, to `metrics.jsonl`, to trackers."""

    default_priority: ClassVar[int] = 60
    mount_points: ClassVar[Tuple[str, ...]] = (
        "before_run",
        "before_train",
        "after_train_iter",
        "on_log",
        "after_val_epoch",
        "after_test_epoch",
        "after_run",
    )
    runs_after: ClassVar[Tuple[str, ...]] = ("runtime_info", "timer", "grad_clip")

    _target_: str = "hydraloop.hooks.LoggerHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: BELOW_NORMAL, MMEngine's: behind the hooks whose numbers it takes."""
    on_error: Optional[str] = "raise"
    """Only `raise`: it reduces over all ranks, and a rank that went on without it would leave the others waiting."""
    interval: Optional[int] = 10
    """Iterations between two records of training; 10 is MMEngine's. Null: none, validation and test only."""
    ignore_last: bool = True
    """Whether the rest of an epoch, shorter than `interval`, waits for the next record (MMEngine's default).
    False: it gets its own."""


@dataclass
class ProgressHookConf:
    """A progress bar in the terminal."""

    default_priority: ClassVar[int] = 100
    mount_points: ClassVar[Tuple[str, ...]] = (
        "before_train",
        "after_train_iter",
        "on_log",
        "before_val",
        "after_val",
        "on_exception",
        "after_train",
    )
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.ProgressHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: LOWEST, so that it shows what everybody else has done."""
    on_error: Optional[str] = "warn"
    """`raise`, `warn` or `disable`; no training should end for its picture."""
    enabled: Union[bool, str] = "auto"
    """`auto`: where standard output is a terminal, so that files and pipes get lines only; true: always;
    false: never."""
    refresh_per_second: float = 10
    """Most updates a second; 10 looks steady and costs about 1 % of one core."""


@dataclass
class ProfilerHookConf:
    """torch.profiler over a few iterations: a trace to open, a table in the log. Names and meaning are MMEngine's."""

    default_priority: ClassVar[int] = 90
    mount_points: ClassVar[Tuple[str, ...]] = (
        "before_run",
        "before_train",
        "after_train_iter",
        "after_train",
    )
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.ProfilerHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: VERY_LOW, MMEngine's: other hooks' work is part of an iteration."""
    on_error: Optional[str] = "warn"
    """`raise`, `warn` or `disable`; no training should end for its profile."""
    by_epoch: bool = True
    """Whether `profile_times` counts epochs (MMEngine's default); false: iterations."""
    profile_times: int = 1
    """Epochs or iterations after which profiling ends at the latest; 1 is MMEngine's: one epoch is like the next."""
    activity_with_cpu: bool = True
    """Record the host's operators; without them a trace shows no cause (MMEngine's default)."""
    activity_with_cuda: Optional[bool] = None
    """Record the accelerator's kernels; null: where the run is on one. (MMEngine: false, which hides them.)"""
    schedule: Optional[Dict[str, int]] = field(
        default_factory=lambda: {"wait": 1, "warmup": 1, "active": 3, "repeat": 1, "skip_first": 0}
    )
    """In iterations: leave out `skip_first`, then `repeat` times (0: until the end) leave out `wait`, throw away
    `warmup`, record `active`. The first iterations pay for start-up, and three show the pattern in a file that can be
    opened. Null, MMEngine's default, records everything."""
    on_trace_ready: Any = field(default_factory=lambda: ["tb_trace", "log_trace"])
    """A list of `tb_trace`, `chrome_trace`, `log_trace` and mappings with `_target_` (`[{_target_: …}]`), one of the
    names alone, or null (MMEngine's default) for nothing. The default leaves a file for TensorBoard and Chrome, and a
    table for who has neither."""
    record_shapes: bool = False
    """Record input shapes; false: it costs time in every operator (MMEngine's default)."""
    profile_memory: bool = True
    """Record allocations; true: memory is half of what people profile for. (MMEngine: false.)"""
    with_stack: bool = False
    """Record file and line of each operator; false: it is slow and makes large traces (MMEngine's default)."""
    with_flops: bool = False
    """Estimate FLOPs of matrix products and 2D convolutions; false: an estimate few need (MMEngine's default)."""
    json_trace_path: Optional[str] = None
    """Also write the trace here, relative to the run directory; a file outside it has to be typed on the command line.
    Null: `tb_trace` is enough (MMEngine's default)."""
    row_limit: int = 20
    """Rows of the table: about a screen."""


@dataclass
class MemoryProfilerHookConf:
    """Memory of the machine, the process and the device, in the log and the records."""

    default_priority: ClassVar[int] = 50
    mount_points: ClassVar[Tuple[str, ...]] = ("after_train_iter", "after_val_iter", "after_test_iter")
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.MemoryProfilerHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: NORMAL, MMDetection's: nothing waits for it."""
    on_error: Optional[str] = "warn"
    """`raise`, `warn` or `disable`; no training should end for a reading."""
    interval: int = 50
    """Iterations of training, or batches of an evaluation, between two readings; 50 is MMDetection's."""


def register(store: ConfigStore) -> None:
    """Store the four default hooks, the profiler and the memory profiler."""
    for name, node in (
        ("runtime_info", RuntimeInfoHookConf),
        ("timer", IterTimerHookConf),
        ("logger", LoggerHookConf),
        ("progress", ProgressHookConf),
    ):
        store.store(group="default_hooks", name=name, package=f"default_hooks.{name}", node=node)
    store.store(group="hooks", name="profiler", package="hooks.profiler", node=ProfilerHookConf)
    store.store(group="hooks", name="memory_profiler", package="hooks.memory_profiler", node=MemoryProfilerHookConf)
