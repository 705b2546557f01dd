"""Where the output of a rank goes: rank 0's to the terminal and train.log, that of every other rank to its own file."""

from __future__ import annotations

import faulthandler
import logging
import os
import socket
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGINT
from typing import Any

from hydraloop.errors import Terminated
from hydraloop.files import console
from hydraloop.files.error_reports import log_cause
from hydraloop.files.result import describe
from hydraloop.files.terminal import print_to
from hydraloop.importing import uncollected
from hydraloop.launch import torchrun
from hydraloop.launch.failure import Failure
from hydraloop.launch.plan import RunPlan
from hydraloop.launch.processes import GRACE, TerminationHandler


def log_of_rank(run_dir: Path, rank: int) -> Path:
    """Return the file with the output of a rank."""
    return run_dir / ("train.log" if rank == 0 else f"rank{rank}.log")


def redirect_output(run_dir: Path, rank: int, verbose: Any) -> None:
    """Redirect all output of a rank other than 0 to its file, also that of native code, and set up logging.

    A crash in native code writes its stack to the same place.

    Args:
        verbose: Hydra's option.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    print_to(log_of_rank(run_dir, rank))  # torch's own redirects would empty the file
    faulthandler.enable(file=2)
    console.set_up(verbose, terminal=False)


log = logging.getLogger(__name__)

_BY_TORCHRUN = 25.0
"""Seconds from a signal to the end of a rank of torchrun, which kills it after 30 s, also while it saves."""


@dataclass(slots=True)
class Training:
    """The parts of a training that signal handlers look at."""

    distributed: Any = None
    engine: Any = None
    is_over: bool = False
    """Whether the training has ended or failed."""

    def is_closing(self) -> bool:
        """Whether a signal must not interrupt it."""
        return self.is_over or self.is_saving() or (self.engine is not None and self.engine.error is not None)

    def is_saving(self) -> bool:
        """Whether the run was preempted: it saves and ends by itself."""
        return self.engine is not None and self.engine.requests.preempting and self.engine.error is None

    def has_trained(self) -> bool:
        """Whether an iteration has been completed."""
        return self.engine is not None and self.engine.progress.iteration > self.engine.progress.began_at


def train(plan: RunPlan, last: Callable[[Failure], None]) -> Failure | None:
    """Build and train as one of several ranks. After a failure, notify the other ranks, then return it.

    Signals are still handled when this has returned: a launcher sends one as soon as another rank has failed.

    Args:
        last: called from another thread if the main thread does not return within `termination.GRACE` seconds after a
            signal, for example from a collective without the other ranks.
    """
    training, rank = Training(), torchrun.rank()
    handler = TerminationHandler(
        lambda number: last(Failure.of(Terminated(number), rank)),
        orphaned=torchrun.remove_folder,
        grace=GRACE if torchrun.is_ours() else _BY_TORCHRUN,
        parent=torchrun.LAUNCHER,
    )
    handler.is_closing = training.is_closing
    if torchrun.is_ours():
        handler.is_saving = training.is_saving
    handler.start()
    torchrun.handles_signals.set()
    try:
        _train(training, plan)
    except BaseException as error:
        training.is_over = True
        if training.distributed is not None:
            training.distributed.abandon(error)
        failure = _failure(training, error, rank, handler.received)
        if rank > 0:
            log.error("%s", describe(error), exc_info=None if failure.kind == "mistake" else error)
        if rank == 0 or failure.kind == "mistake":
            log_cause(error)
        handler.end_within_grace()
        return failure
    training.is_over = True
    return None


def _train(training: Training, plan: RunPlan) -> None:
    with uncollected():
        import torch._dynamo  # noqa: F401  # DDP and FSDP2 do

        from hydraloop.engine.distributed.process_group import connect
        from hydraloop.launch.build import build

    cfg = plan.cfg
    training.distributed = connect(cfg.distributed, cfg.engine.device)
    if training.distributed.rank > 0:
        log.info("rank %d, process %d on %s", training.distributed.rank, os.getpid(), socket.gethostname())
    training.engine = build(plan, training.distributed)
    training.engine.train()
    training.distributed.close()


def _failure(training: Training, error: BaseException, rank: int, received: int) -> Failure:
    """Return why this rank failed, if the first signal that it has received is `received` (0: none)."""
    first = None if training.distributed is None else training.distributed.first_failure()
    failure = Failure.of(error, rank, trained=training.has_trained(), first=first)
    if received == SIGINT and failure.kind == "lost":  # all ranks got the signal, and another one has ended first
        return replace(failure, kind="signal", number=received)
    return failure
