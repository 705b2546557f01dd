"""EmptyCacheHook: gives memory that torch keeps for later back to the device."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from hydraloop.engine.hook import GENERAL_POINTS, Hook, Mode, Priority

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)


class EmptyCacheHook(Hook):
    """Gives the memory that torch's allocator has cached and nobody uses back to the device, for other processes on it.

    It frees nothing that the run holds. It helps where several processes share a device, and against fragments that
    training and evaluation, with their different shapes, leave behind. On a CPU torch caches nothing: there it says so
    once, and does nothing. Any accelerator of torch is served by the `empty_cache` of its module (`torch.cuda`,
    `torch.xpu`, `torch.mps`, or one that registers itself).

    Mount points: before_run, and those that are switched on, in training, validation and test alike:
    before_train_epoch, before_val_epoch, before_test_epoch, after_train_epoch, after_val_epoch, after_test_epoch,
    after_train_iter, after_val_iter, after_test_iter. Priority NORMAL, MMEngine's. Cost: a host sync a call (on a GPU,
    freeing waits for the device), and the next iterations allocate anew. No state. Options and defaults are mmengine's.

    Args:
        before_epoch: before each epoch.
        after_epoch: after each epoch.
        after_iter: after each iteration; slow.
    """

    priority = Priority.NORMAL

    def __init__(self, *, before_epoch: bool = False, after_epoch: bool = True, after_iter: bool = False) -> None:
        chosen = {"before_epoch": before_epoch, "after_epoch": after_epoch, "after_iter": after_iter}
        self.idle_points = {point for name, on in chosen.items() if not on for point, _ in GENERAL_POINTS[name]}

    def before_run(self, engine: Engine) -> None:
        """Say, once, where there is nothing to do."""
        if engine.device.type == "cpu":
            log.info("%s: this run is on the CPU, where torch caches no memory: there is nothing to empty", self.key)

    def before_epoch(self, engine: Engine, mode: Mode) -> None:
        """Empty it, with `before_epoch`."""
        _empty_cache(engine.device)

    def after_epoch(self, engine: Engine, mode: Mode) -> None:
        """Empty it, with `after_epoch`."""
        _empty_cache(engine.device)

    def after_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Mapping[str, Any], mode: Mode) -> None:
        """Empty it, with `after_iter`."""
        _empty_cache(engine.device)


def _empty_cache(device: torch.device) -> None:
    if device.type != "cpu":
        torch.get_device_module(device).empty_cache()
