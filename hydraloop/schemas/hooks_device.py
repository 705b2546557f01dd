"""Options of the hooks about devices and ranks: empty_cache, sync_buffers, sync_norm, npu_profiler."""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Dict, Optional, Tuple, Union

from hydra.core.config_store import ConfigStore


@dataclass
class EmptyCacheHookConf:
    """Gives cached memory that nobody uses back to the device."""

    default_priority: ClassVar[int] = 50
    mount_points: ClassVar[Tuple[str, ...]] = (
        "before_run",
        "before_train_epoch",
        "after_train_iter",
        "after_train_epoch",
        "before_val_epoch",
        "after_val_iter",
        "after_val_epoch",
        "before_test_epoch",
        "after_test_iter",
        "after_test_epoch",
    )
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.EmptyCacheHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: NORMAL, MMEngine's."""
    on_error: Optional[str] = "raise"
    """`raise`, `warn` or `disable`; a device that fails here has failed."""
    before_epoch: bool = False
    """Whether before each train, val and test epoch; false, MMEngine's: after the one before is the same moment."""
    after_epoch: bool = True
    """Whether after each train, val and test epoch; true, MMEngine's: what follows needs other sizes."""
    after_iter: bool = False
    """Whether after each iteration; false, MMEngine's: it makes each of them wait for the device and allocate anew."""


@dataclass
class SyncBuffersHookConf:
    """All buffers, averaged over the ranks at the end of each epoch."""

    default_priority: ClassVar[int] = 50
    mount_points: ClassVar[Tuple[str, ...]] = ("after_train_epoch", "before_val")
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.SyncBuffersHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: NORMAL, MMEngine's: before the checkpoint that saves them."""
    on_error: Optional[str] = "raise"
    """Only `raise`: all ranks take part, and one that went on without it would leave the others waiting."""


@dataclass
class SyncNormHookConf:
    """Running statistics of normalisation layers, averaged over the ranks before each evaluation."""

    default_priority: ClassVar[int] = 50
    mount_points: ClassVar[Tuple[str, ...]] = ("before_val", "before_test")
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.SyncNormHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: NORMAL, MMDetection's."""
    on_error: Optional[str] = "raise"
    """Only `raise`: all ranks take part, and one that went on without it would leave the others waiting."""


@dataclass
class NPUProfilerHookConf:
    """torch_npu.profiler over a few iterations, on Ascend NPUs; as `profiler` otherwise."""

    default_priority: ClassVar[int] = 90
    mount_points: ClassVar[Tuple[str, ...]] = ("before_run", "before_train", "after_train_iter", "after_train")
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.NPUProfilerHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: VERY_LOW, MMEngine's: other hooks' work is part of an iteration."""
    on_error: Optional[str] = "warn"
    """`raise`, `warn` or `disable`; no training should end for its profile."""
    by_epoch: bool = True
    """Whether `profile_times` counts epochs, as in `profiler`; false: iterations."""
    profile_times: int = 1
    """Epochs or iterations after which profiling ends at the latest; 1: one epoch is like the next."""
    activity_with_cpu: bool = True
    """Record the host's operators; without them a trace shows no cause."""
    activity_with_npu: Optional[bool] = None
    """Record the NPU's kernels; null: where the run is on one."""
    schedule: Optional[Dict[str, int]] = field(
        default_factory=lambda: {"wait": 1, "warmup": 1, "active": 3, "repeat": 1, "skip_first": 0}
    )
    """In iterations, as in `profiler`: leave out `skip_first`, then `repeat` times (0: until the end) leave out `wait`,
    throw away `warmup`, record `active`. Null records everything."""
    on_trace_ready: Any = "tb_trace"
    """`tb_trace`, `chrome_trace`, a mapping with `_target_`, a list of these, or null for nothing. The default leaves
    what MindStudio Insight and TensorBoard's Ascend plug-in open; torch_npu has no table to log."""
    record_shapes: bool = False
    """Record input shapes; false: it costs time in every operator."""
    profile_memory: bool = True
    """Record allocations; true: memory is half of what people profile for."""
    with_stack: bool = False
    """Record file and line of each operator; false: it is slow and makes large traces."""
    with_flops: bool = False
    """Estimate FLOPs; false: an estimate few need."""
    json_trace_path: Optional[str] = None
    """Also write a Chrome trace here, relative to the run directory; a file outside it has to be typed on the command
    line. Null: `tb_trace` is enough."""


def register(store: ConfigStore) -> None:
    """Store them in the group `hooks`."""
    for name, node in (
        ("empty_cache", EmptyCacheHookConf),
        ("sync_buffers", SyncBuffersHookConf),
        ("sync_norm", SyncNormHookConf),
        ("npu_profiler", NPUProfilerHookConf),
    ):
        store.store(group="hooks", name=name, package=f"hooks.{name}", node=node)
