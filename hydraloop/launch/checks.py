"""Checks before processes are started: their number, and the devices of this machine."""

from __future__ import annotations

import os
from typing import Any

from omegaconf import DictConfig

from hydraloop.config.value_checks import check_strategy
from hydraloop.errors import UserError
from hydraloop.launch import torchrun


def check(cfg: DictConfig) -> None:
    """Check `distributed`, and the devices of this machine. Imports torch for several processes only."""
    check_options(cfg)
    if several(cfg):
        _check_machine(str(cfg.engine.device), _processes(cfg.distributed))


def check_options(cfg: DictConfig) -> None:
    """Check `distributed`, as far as another machine may train the run. Does not import torch."""
    options = cfg.distributed
    _processes(options)
    check_strategy(options.strategy, several=several(cfg))


def several(cfg: Any) -> bool:
    """Return whether several processes train, started by hydraloop or by torchrun."""
    return torchrun.is_several() or starts_ranks(cfg)


def starts_ranks(cfg: Any) -> bool:
    """Return whether this process starts the ranks that train."""
    return not torchrun.is_several() and cfg.distributed.nproc_per_node * cfg.distributed.nnodes > 1


def check_single_run() -> None:
    """Refuse a sweep under torchrun."""
    if torchrun.is_several():
        count = torchrun.local_world_size()
        raise UserError(
            "a sweep cannot run under torchrun: each of its jobs needs new ranks",
            key="--multirun",
            remedy=f"Let each job start them: python train.py -m … distributed.nproc_per_node={count}",
        )


def check_debugger(cfg: Any, *, is_sweep: bool) -> None:
    """Refuse `--pdb` unless one process trains one run: only that has the terminal."""
    if is_sweep or several(cfg):
        problem = "the debugger stops one process of one run"
        raise UserError(problem, key="--pdb", remedy="Leave out -m, torchrun and distributed.nproc_per_node.")


def _processes(options: DictConfig) -> int:
    """Return the number of processes on this machine."""
    wanted = int(options.nproc_per_node)
    if not torchrun.is_launched():
        return wanted
    started = torchrun.local_world_size()
    options_of_torchrun = {"nproc_per_node": wanted not in (1, started), "max_restarts": options.max_restarts}
    for name, is_set in options_of_torchrun.items():
        if is_set and not torchrun.is_ours():
            problem, remedy = "torchrun starts the processes", f"Give it to torchrun: --{name.replace('_', '-')}="
            raise UserError(problem, key=f"distributed.{name}", remedy=f"{remedy}{options[name]}")
    return started


def _check_machine(device: str, processes: int) -> None:
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    kind = ("cpu" if accelerator is None else accelerator.type) if device == "auto" else device.partition(":")[0]
    if ":" in device and processes > 1:
        raise UserError(
            f"{processes} processes would share {device}",
            key="engine.device",
            remedy=f"Use {kind}: each process takes the device of its number. Choose GPUs with CUDA_VISIBLE_DEVICES.",
        )
    if kind != "cpu":
        count = torch.accelerator.device_count() if accelerator is not None and accelerator.type == kind else 0
        _check_count(processes, count, device)


def _check_count(processes: int, count: int, device: str) -> None:
    if processes <= count:
        return
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    seen = "" if hidden is None else f" (CUDA_VISIBLE_DEVICES={hidden})"
    if count == 0:
        remedy = "Use auto or cpu."
        raise UserError(f"this machine has no {device}{seen}", key="engine.device", remedy=remedy)
    raise UserError(
        f"{processes} processes would share {count} GPU{'' if count == 1 else 's'}{seen}",
        key="distributed.nproc_per_node",
        remedy=f"Use {count}, or engine.device=cpu.",
    )
