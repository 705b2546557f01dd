"""Checks before processes are started. The devices of this machine are checked by each process (`choose_device`)."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig

from hydraloop.config.value_checks import check_strategy
from hydraloop.errors import UserError
from hydraloop.launch import torchrun


def check_options(cfg: DictConfig) -> None:
    """Check the group `distributed`. Does not import torch."""
    if torchrun.is_launched() and not torchrun.is_ours():
        _check_torchrun(cfg.distributed)
    check_strategy(cfg.distributed.strategy, several=several(cfg))


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


def _check_torchrun(options: DictConfig) -> None:
    """Refuse options of hydraloop's launcher that torchrun decides."""
    is_other_number = options.nproc_per_node not in (1, torchrun.local_world_size())
    for name, is_set in {"nproc_per_node": is_other_number, "max_restarts": options.max_restarts}.items():
        if is_set:
            remedy = f"Give it to torchrun: --{name.replace('_', '-')}={options[name]}"
            raise UserError("torchrun starts the processes", key=f"distributed.{name}", remedy=remedy)
