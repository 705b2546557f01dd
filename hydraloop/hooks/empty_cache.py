"""EmptyCacheHook: returns unused cached memory to the device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import GENERAL_POINTS, Hook, Mode

log = logging.getLogger(__name__)


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
