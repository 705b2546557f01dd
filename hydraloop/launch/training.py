"""Training as one rank, from a config to an outcome."""

from __future__ import annotations

import logging
import os
import socket
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGINT
from typing import Any

from omegaconf import DictConfig, OmegaConf

from hydraloop.launch.job import Job
from hydraloop.launch.outcome import Outcome, Terminated
from hydraloop.launch.termination import Ending
from hydraloop.run.directory import Resumed
from hydraloop.run.result import Result, describe
from hydraloop.safety import typed_options as typed
from hydraloop.safety.allowlist import ALLOWLIST

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Training:
    """What a rank has made so far; filled as it goes on, and looked at from a signal handler."""

    rank: int = 0
    distributed: Any = None
    engine: Any = None
    is_over: bool = False
    """Whether it has ended or failed."""

    @property
    def is_closing(self) -> bool:
        """Whether nothing should be interrupted any more."""
        return self.is_over or (self.engine is not None and self.engine.error is not None)

    @property
    def trained(self) -> bool:
        """Whether an iteration has been completed."""
        return self.engine is not None and self.engine.progress.iteration > self.engine.began_at


def value_of(result: Result) -> float | None:
    """What a sweep optimises: the best, else the last, validation."""
    return result.best.value if result.best is not None else next(iter(result.val_metrics.values()), None)


def train(job: Job, rank: int, ending: Ending) -> Outcome:
    """Train as this rank; all ranks do. Whatever is raised is in the outcome, and told to the others first."""
    training = Training(rank)
    ending.is_closing = lambda: training.is_closing
    for folder in job.folders:
        ALLOWLIST.trust_folder(Path(folder))
    ALLOWLIST.trust(job.trusted)
    ALLOWLIST.is_in_main = True
    try:
        result = _train(training, job)
    except BaseException as error:
        training.is_over = True
        if training.distributed is not None:
            training.distributed.abandon(error)
        outcome = _failed(training, error, ending)
        if rank > 0:
            log.error("%s", describe(error), exc_info=None if outcome.kind == "mistake" else error)
        ending.end_within_grace()
        return outcome
    training.is_over = True
    return Outcome(rank, "done", value=value_of(result), trained=training.trained)


def _train(training: Training, job: Job) -> Result:
    from hydraloop.builder import build  # torch is imported here
    from hydraloop.engine.distributed.process_group import connect

    cfg = OmegaConf.create(job.config)
    assert isinstance(cfg, DictConfig)
    typed.remember(cfg, job.typed)
    training.distributed = connect(cfg.distributed, cfg.engine.device)
    if training.rank > 0:
        log.info("rank %d, process %d on %s", training.rank, os.getpid(), socket.gethostname())
    run_dir, checkpoint = Path(job.run_dir), None if job.checkpoint is None else Path(job.checkpoint)
    resumed = Resumed(run_dir, checkpoint)
    training.engine = build(cfg, run_dir=run_dir, resumed=resumed, distributed=training.distributed)
    result: Result = training.engine.train()
    training.distributed.close()
    return result


def _failed(training: Training, error: BaseException, ending: Ending) -> Outcome:
    first = None if training.distributed is None else training.distributed.first_failure()
    outcome = Outcome.of(error, training.rank, trained=training.trained, first=first)
    if outcome.kind == "mistake" or not ending.asked:
        return outcome
    told_too = first is not None and first[1].startswith((Terminated.__name__, KeyboardInterrupt.__name__))
    if told_too or (ending.asked == SIGINT and outcome.kind == "lost"):
        return replace(outcome, kind="signal", number=ending.asked, first=None)  # all were, and some went first
    return outcome
