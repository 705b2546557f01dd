"""Memory of the machine and the device: measured, and the cache of the device emptied."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import Any

import torch

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import GENERAL_POINTS, Hook, Mode
from hydraloop.engine.interval import Every
from hydraloop.engine.messages import position
from hydraloop.schemas.option_checks import check_at_least

log = logging.getLogger(__name__)

_MIB = 2**20


class MemoryProfilerHook(Hook):
    """Reports memory, so that a leak is visible before it ends the run.

    Every `interval` iterations of training, and every `interval` batches of a validation or test, it writes one line to
    the log and one record, `{"mode", "epoch", "iteration", …}`, to `metrics.jsonl` and trackers, with MMDetection's
    names:

    * `available_memory`, `used_memory` [MiB], `memory_utilization` [%]: of the machine, regardless of a container's
      limit.
    * `available_swap_memory`, `used_swap_memory` [MiB], `swap_memory_utilization` [%].
    * `current_process_memory` [MiB]: resident memory of this process, without the loader's workers.
    * `allocated_device_memory`, `reserved_device_memory` [MiB]: used by torch's tensors on the accelerator, and
      reserved by torch there; not on a CPU.

    Priority NORMAL, MMDetection's. Runs on rank 0 only. No host sync: torch's allocator keeps its numbers on the host.
    A report takes about 0.1 ms. No state. Options: `MemoryProfilerHookConf`. From MMDetection's MemoryProfilerHook,
    which counts iterations within the epoch and so never reports if epochs are shorter than the interval.
    """

    on_error = "warn"
    rank_zero_only = True

    def __init__(self, *, interval: int = 50) -> None:
        check_at_least(1, interval=interval)
        self._fires_at = Every(interval).fires_at

    def after_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any], mode: Mode) -> None:
        """Report every `interval` iterations of training, and batches of an evaluation."""
        if not self._fires_at(engine.progress.iteration if mode == "train" else batch_idx + 1):
            return
        readings = {**host_memory(), **device_memory(engine.device)}
        words = (
            f"{name}: {value:.1f} %" if name.endswith("utilization") else f"{name}: {value:.0f} MiB"
            for name, value in readings.items()
        )
        log.info("Memory information %s", ", ".join(words))
        engine.log_record({**position(engine.progress, mode), **readings})


def host_memory() -> dict[str, float]:
    """Return the memory and swap of the machine and the memory of this process, in MiB and percent."""
    import psutil

    memory = psutil.virtual_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # some containers do not report it
        swap = psutil.swap_memory()
    return {
        "available_memory": memory.available / _MIB,
        "used_memory": memory.used / _MIB,
        "memory_utilization": memory.percent,
        "available_swap_memory": (swap.total - swap.used) / _MIB,
        "used_swap_memory": swap.used / _MIB,
        "swap_memory_utilization": swap.percent,
        "current_process_memory": psutil.Process().memory_info().rss / _MIB,
    }


def device_memory(device: torch.device) -> dict[str, float]:
    """Return MiB used and reserved by torch on an accelerator; nothing on a CPU. No host sync."""
    if device.type == "cpu":
        return {}
    if device.type == "mps":
        allocated, reserved = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
    else:
        module = torch.get_device_module(device)
        allocated, reserved = module.memory_allocated(device), module.memory_reserved(device)
    return {"allocated_device_memory": allocated / _MIB, "reserved_device_memory": reserved / _MIB}


class EmptyCacheHook(Hook):
    """Returns memory that torch's allocator has cached but does not use to the device.

    It does not free memory that the run uses. It helps if several processes share a device, and against fragmentation
    by the different shapes of training and evaluation. It works on every accelerator whose torch module has
    `empty_cache` (`torch.cuda`, `torch.xpu`, `torch.mps`, …). On a CPU, torch caches nothing: the hook logs that and
    does nothing.

    Priority NORMAL, MMEngine's. Cost: a host sync per call (a GPU waits before it frees memory), and the next
    iterations allocate their memory again. No state. Options and defaults are MMEngine's: `EmptyCacheHookConf`.
    """

    def __init__(self, *, before_epoch: bool = False, after_epoch: bool = True, after_iter: bool = False) -> None:
        chosen = {"before_epoch": before_epoch, "after_epoch": after_epoch, "after_iter": after_iter}
        self.idle_points = {point for name, on in chosen.items() if not on for point, _ in GENERAL_POINTS[name]}

    def before_run(self, engine: Engine) -> None:
        if engine.device.type == "cpu":
            log.info("%s: this run is on the CPU, where torch caches no memory: there is nothing to empty", self.key)

    def before_epoch(self, engine: Engine, mode: Mode) -> None:
        _empty_cache(engine.device)

    def after_epoch(self, engine: Engine, mode: Mode) -> None:
        _empty_cache(engine.device)

    def after_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any], mode: Mode) -> None:
        _empty_cache(engine.device)


def _empty_cache(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
