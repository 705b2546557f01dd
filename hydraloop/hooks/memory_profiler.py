"""MemoryProfilerHook: how much memory the machine, the process and the device have left."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hydraloop.engine.hook import Hook, Mode, Priority
from hydraloop.engine.interval import Every
from hydraloop.errors import UserError
from hydraloop.hooks.shared.record_entries import position

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)

_MIB = 2**20


class MemoryProfilerHook(Hook):
    """Watches memory, so that a leak shows before it ends the run.

    Every `interval` iterations of training, and every `interval` batches of a validation or test, one line in the log,
    in MMDetection's words, and one record, `{"mode", "epoch", "iteration", …}`, in `metrics.jsonl` and for trackers:

    * `available_memory`, `used_memory` [MiB], `memory_utilization` [%]: of the machine. A container's own limit is not
      seen.
    * `available_swap_memory`, `used_swap_memory` [MiB], `swap_memory_utilization` [%].
    * `current_process_memory` [MiB]: resident, of this process; workers of a loader have their own.
    * `allocated_device_memory`, `reserved_device_memory` [MiB]: what torch's tensors take on the accelerator now, and
      what torch holds there for them; not on a CPU.

    Mount points: after_train_iter, after_val_iter, after_test_iter. Priority NORMAL, MMDetection's: nothing waits for
    it. On rank 0 only, for its process and its device. No host sync: torch's allocator keeps these numbers on the
    host; reading them all takes some 0.1 ms. No state. Errors warn: no training fails for a reading. From MMDetection's
    MemoryProfilerHook, which counts training iterations within the epoch: with epochs shorter than the interval it
    would never speak.

    Args:
        interval: iterations (batches, in an evaluation) between two readings, at least 1.

    Raises:
        UserError: an interval below 1.
    """

    priority = Priority.NORMAL
    on_error = "warn"
    rank_zero_only = True

    def __init__(self, *, interval: int = 50) -> None:
        if interval < 1:
            raise UserError(f"{interval} is below 1", key="interval", remedy="Use 1 to look at every iteration.")
        self._due = Every(interval).due

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Look, where an iteration is due."""
        if self._due(engine.progress.iteration):
            _report(engine, "train")

    def after_val_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Look, where a batch of this validation is due."""
        if self._due(batch_idx + 1):
            _report(engine, "val")

    def after_test_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any]) -> None:
        """Look, where a batch of the test is due."""
        if self._due(batch_idx + 1):
            _report(engine, "test")


def _report(engine: Engine, mode: Mode) -> None:
    readings = {**host_memory(), **device_memory(engine.device)}
    words = (
        f"{name}: {value:.1f} %" if name.endswith("utilization") else f"{name}: {value:.0f} MiB"
        for name, value in readings.items()
    )
    log.info("Memory information %s", ", ".join(words))
    engine.log_record({**position(engine, mode), **readings})


def host_memory() -> dict[str, float]:
    """MiB and percent of the machine's memory and swap space, MiB of this process; see the hook."""
    import psutil

    memory = psutil.virtual_memory()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # in some containers: how much was swapped is not known
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
    """MiB that torch's tensors take on an accelerator, and that torch holds there; nothing on a CPU. No host sync."""
    if device.type == "cpu":
        return {}
    if device.type == "mps":
        allocated, reserved = torch.mps.current_allocated_memory(), torch.mps.driver_allocated_memory()
    else:
        module = torch.get_device_module(device)
        allocated, reserved = module.memory_allocated(device), module.memory_reserved(device)
    return {"allocated_device_memory": allocated / _MIB, "reserved_device_memory": reserved / _MIB}
