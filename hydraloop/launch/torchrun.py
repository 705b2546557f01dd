"""What the environment says if a launcher (torchrun, hydraloop) has started this process as a rank; and its checks."""

from __future__ import annotations

import json
import os
import shutil
import signal
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import cache
from typing import Any

from omegaconf import DictConfig

from hydraloop.config.value_checks import check_strategy
from hydraloop.errors import UserError
from hydraloop.files.secrets import put_secrets_back
from hydraloop.importing import uncollected
from hydraloop.launch.termination import watch_parent

NODE = "HYDRALOOP_NODE"
"""Variable of ranks that hydraloop has started: the folder of the process that has started them, see `start_ranks`."""
OWNER = "HYDRALOOP_LAUNCHER"
"""Variable of such ranks: the ID of that process, which may have ended before this one could ask for it."""
RANK_JOB = "HYDRALOOP_RANK_JOB"
"""Variable with what a rank of a sweep's job has to know of the job, as JSON."""
LAUNCHER = int(os.environ.get(OWNER, os.getppid()))
"""The ID of the process that has started this one, which may have ended since."""
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_WAIT = timedelta(minutes=30)
"""Timeout for rank 0's plan, torch's own default: composing on a slow disk may take minutes."""


def is_several() -> bool:
    """Return whether this process is one of several ranks."""
    return all(name in os.environ for name in _NEEDED) and int(os.environ["WORLD_SIZE"]) > 1


def is_launched() -> bool:
    """Return whether a launcher has started this process, even if it is the only one."""
    return is_several() or "TORCHELASTIC_RUN_ID" in os.environ


def is_ours() -> bool:
    """Return whether hydraloop has started this process as a rank. Then its launcher reports errors."""
    return NODE in os.environ


def own_arguments(arguments: Sequence[str]) -> tuple[list[str], Any]:
    """Return the arguments of this rank, which hydraloop has started, and its `RANK_JOB`; None for a single run."""
    content = {"arguments": list(arguments)}
    put_secrets_back(content)
    return content["arguments"], json.loads(os.environ.pop(RANK_JOB, "null"))


def remove_folder() -> None:
    """Remove the folder of the ranks that hydraloop has started: the process that has started them was killed."""
    if is_ours():
        shutil.rmtree(os.environ[NODE], ignore_errors=True)


handles_signals = threading.Event()
"""Set when the run of this rank handles signals, and saves after one."""


def end_with_launcher() -> None:
    """End this process when its launcher has ended. Otherwise, it would wait 30 minutes for a store.

    A run gets SIGTERM. Before a run handles signals, there is nothing to save: the process ends at once.
    """

    def end() -> None:
        remove_folder()
        if not handles_signals.is_set():
            os._exit(1)
        os.kill(os.getpid(), signal.SIGTERM)

    watch_parent(LAUNCHER, end)


def reports() -> bool:
    """Return whether this process prints errors and writes them into `result.json`."""
    return rank() == 0 and not is_ours()


def rank() -> int:
    """Return the rank of this process; 0 if it is the only one."""
    return int(os.environ["RANK"]) if is_several() else 0


def keep_quiet() -> None:
    """Silence torch's stack traces of each connection to a rank that has ended. Call it before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def local_world_size() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def attempt() -> int:
    """Return 0 for the first start, n for the n-th restart."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


def keeps_store() -> bool:
    """Return whether torch's launcher keeps the store, also over restarts. Otherwise, rank 0 does."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


@cache
def connect() -> Any:
    """Return the store that all ranks share. A launcher that keeps it keeps it over restarts.

    There is one connection: it fails at once if the store has ended, and a new one would try for as long as `_WAIT`.
    """
    with uncollected():
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=_WAIT))
    return PrefixStore("hydraloop-launch", store)


def of_this_start(store: Any) -> Any:
    """Return the part of a store that belongs to this start: a restarted rank must not read an earlier plan."""
    from torch.distributed.distributed_c10d import PrefixStore

    return PrefixStore(str(attempt()), store)


def check_options(cfg: DictConfig) -> None:
    """Check the group `distributed`. Does not import torch."""
    if is_launched() and not is_ours():
        _check_torchrun(cfg.distributed)
    check_strategy(cfg.distributed.strategy, several=several(cfg))


def several(cfg: Any) -> bool:
    """Return whether several processes train, started by hydraloop or by"""
    return is_several() or starts_ranks(cfg)


def starts_ranks(cfg: Any) -> bool:
    """Return whether this process starts the ranks that train."""
    return not is_several() and cfg.distributed.nproc_per_node * cfg.distributed.nnodes > 1


def check_single_run() -> None:
    """Refuse a sweep under"""
    if is_several():
        count = local_world_size()
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
    is_other_number = options.nproc_per_node not in (1, local_world_size())
    for name, is_set in {"nproc_per_node": is_other_number, "max_restarts": options.max_restarts}.items():
        if is_set:
            remedy = f"Give it to torchrun: --{name.replace('_', '-')}={options[name]}"
            raise UserError("torchrun starts the processes", key=f"distributed.{name}", remedy=remedy)
