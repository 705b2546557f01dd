"""Trains in this process, alone or as one of several ranks, and catches the signals that end the run."""

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
from hydraloop.launch.failure import Failure, RunEnd
from hydraloop.launch.plan import LOG, RunPlan
from hydraloop.launch.termination import GRACE, TerminationHandler

log = logging.getLogger(__name__)

_GRACE_OF_TORCHRUN = 25.0
"""Seconds from a signal to the end of a rank of torchrun, which kills it after 30 s, also while it saves."""


@dataclass(slots=True)
class _Training:
    """A training, as the handlers of signals see it."""

    distributed: Any = None
    engine: Any = None
    has_ended: bool = False
    """Whether the training has ended or failed."""

    def is_closing(self) -> bool:
        """Return whether a signal must not interrupt it."""
        has_failed = self.engine is not None and self.engine.error is not None
        return self.has_ended or has_failed or self.is_saving()

    def is_saving(self) -> bool:
        """Return whether the run was preempted: it saves and ends by itself."""
        return self.engine is not None and self.engine.requests.preempting and self.engine.error is None

    def has_trained(self) -> bool:
        """Return whether an iteration has been completed."""
        return self.engine is not None and self.engine.progress.iteration > self.engine.progress.began_at


def train_alone(plan: RunPlan, report: Callable[[RunEnd], None]) -> RunEnd:
    """Build and train in a single process. SIGTERM and SIGHUP end the run as Ctrl-C does, unless they preempt it.

    Args:
        report: called once when the run has ended. If it has failed, or was interrupted or preempted, no signal
            interrupts this call. Called from another thread if the main thread does not return within
            `termination.GRACE` seconds after a signal.
    """
    training = _Training()

    def report_timeout(number: int) -> None:
        engine = training.engine
        result = None if engine is None else engine.outcome.result
        if result is not None and result.error is None:
            return  # a run that has finished keeps its result
        error = None if engine is None else engine.error
        report(RunEnd(error=error or Terminated(number), trained=training.has_trained()))

    handler = TerminationHandler(
        on_timeout=report_timeout,
        is_closing=training.is_closing,
        is_saving=training.is_saving,
        launched=torchrun.is_launched(),
    ).start()
    torchrun.handles_signals.set()
    try:
        with uncollected():
            from hydraloop.engine.distributed.comm import Distributed
            from hydraloop.launch.build import build  # imports torch

        training.engine = build(plan, Distributed())
        training.engine.train()
        end = RunEnd.from_result(plan.run_dir)
    except BaseException as error:
        training.has_ended = True
        # After a preemption, the earlier handler of the signal may raise anything, and nothing has failed.
        result = training.engine.outcome.result if training.is_saving() else None
        is_saved = result is not None and result.status == "interrupted"
        end = RunEnd.from_result(plan.run_dir) if is_saved else RunEnd(error=error, trained=training.has_trained())
        report(end)
    else:
        report(end)
    finally:
        handler.stop()
    if handler.received and not isinstance(end.error, KeyboardInterrupt):  # while the run was closing
        return RunEnd(error=Terminated(handler.received))
    return end


def train_as_rank(plan: RunPlan, report_failure: Callable[[Failure], None]) -> Failure | None:
    """Build and train as one of several ranks. After a failure, notify the other ranks, report it and return it.

    Signals are still handled when this function has returned: a launcher sends one as soon as another rank has failed.

    Args:
        report_failure: called from another thread if the main thread does not return within `termination.GRACE`
            seconds after a signal, for example from a collective without the other ranks.
    """
    training = _Training()
    rank = torchrun.rank()
    handler = TerminationHandler(
        on_timeout=lambda number: report_failure(Failure.of(Terminated(number), rank)),
        is_closing=training.is_closing,
        is_saving=training.is_saving if torchrun.is_ours() else None,
        grace=GRACE if torchrun.is_ours() else _GRACE_OF_TORCHRUN,
    ).start()
    torchrun.handles_signals.set()
    try:
        _connect_and_train(training, plan)
    except BaseException as error:
        training.has_ended = True
        if training.distributed is not None:
            training.distributed.abandon(error)
        failure = _failure(training, error, rank, handler.received)
        is_mistake = failure.kind == "mistake"
        if rank > 0:
            log.error("%s", describe(error), exc_info=None if is_mistake else error)
        if rank == 0 or is_mistake:
            log_cause(error)
        handler.end_within_grace()
        report_failure(failure)
        return failure
    training.has_ended = True
    return None


def _connect_and_train(training: _Training, plan: RunPlan) -> None:
    with uncollected():
        import torch._dynamo  # noqa: F401  # DDP and FSDP2 do

        from hydraloop.engine.distributed.process_group import connect
        from hydraloop.launch.build import build

    training.distributed = connect(plan.cfg.distributed, plan.cfg.engine.device)
    if training.distributed.rank > 0:
        log.info("rank %d, process %d on %s", training.distributed.rank, os.getpid(), socket.gethostname())
    training.engine = build(plan, training.distributed)
    training.engine.train()
    training.distributed.close()


def _failure(training: _Training, error: BaseException, rank: int, received: int) -> Failure:
    """Return why this rank failed.

    Args:
        received: the first signal that this rank has received; 0 without one.
    """
    first = None if training.distributed is None else training.distributed.first_failure()
    failure = Failure.of(error, rank, trained=training.has_trained(), first=first)
    if received == SIGINT and failure.kind == "lost":  # all ranks got the signal, and another one has ended first
        return replace(failure, kind="signal", number=received)
    return failure


def log_of_rank(run_dir: Path, rank: int) -> Path:
    """Return the file with the output of a rank."""
    return run_dir / (LOG if rank == 0 else f"rank{rank}.log")


def redirect_output(run_dir: Path, rank: int, verbose: Any) -> None:
    """Redirect all output of a rank other than 0 to its file, also that of native code, and set up logging.

    A crash in native code writes its stack to the same file.

    Args:
        verbose: Hydra's option.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    print_to(log_of_rank(run_dir, rank))  # torch's own redirects would empty the file
    faulthandler.enable(file=2)
    console.set_up(verbose, terminal=False)
