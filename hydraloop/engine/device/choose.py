"""Chooses the device of a run (`engine.device`), and makes it the current one."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from hydraloop.errors import Remedy, UserError


def choose_device(wanted: str, *, local_rank: int | None = None) -> torch.device:
    """Return the device of this process. If it has a number, it becomes the current device of the calling thread.

    Args:
        wanted: `auto` for the current accelerator, if there is one, else the CPU; or `cpu`, `cuda`, `cuda:1`.
        local_rank: with several processes, the number of this one on its machine: it uses the device of that number
            unless `wanted` names another. None: a single process.

    Raises:
        UserError: torch knows no such device, or this machine does not have it.
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    available = 0 if accelerator is None else torch.accelerator.device_count()
    remedy = Remedy("Use auto, cpu, or a device such as cuda:0.", (wanted, "auto"))
    try:
        device = (accelerator or torch.device("cpu")) if wanted == "auto" else torch.device(wanted)
    except RuntimeError as error:
        raise UserError(f"torch knows no device {wanted!r}", key="engine.device", remedy=remedy) from error
    if device.type == "cpu":
        return device
    here = available if accelerator is not None and accelerator.type == device.type else 0
    if (device.index or 0) >= here:
        remedy = remedy if here else Remedy("Use auto or cpu.", (wanted, "auto"))
        raise UserError(f"this machine has no {wanted}", key="engine.device", remedy=remedy)
    if local_rank is not None and wanted in ("auto", device.type):
        if local_rank >= available:
            raise UserError(
                f"there are {available} devices for the process {local_rank} (from 0) of this machine",
                key="distributed.nproc_per_node",
                remedy=f"Use {available} or fewer, or engine.device=cpu.",
            )
        device = torch.device(device.type, local_rank)
    if device.index is not None:
        torch.accelerator.set_device_index(device.index)
    return device


def same_device() -> Callable[[], object]:
    """Return a function that gives the thread that calls it the current device of this thread.

    A new thread begins with device 0, and its first call of CUDA would take memory there.
    """
    if not torch.accelerator.is_available():
        return lambda: None
    return functools.partial(torch.accelerator.set_device_index, torch.accelerator.current_device_index())
