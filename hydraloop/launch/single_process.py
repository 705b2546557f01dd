"""Training in this process, without others."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from hydraloop.launch import torchrun
from hydraloop.launch.failure import Ended, Terminated
from hydraloop.launch.termination import TerminationHandler
from hydraloop.launch.training import Training, sweep_value
from hydraloop.run import directory as run_directory


def train(
    cfg: DictConfig, run_dir: Path, close: Callable[[Ended], None], restarted: run_directory.Resumed | None = None
) -> Ended:
    """Build and train in a single process. SIGTERM and SIGHUP end the run as Ctrl-C does.

    Args:
        close: called once when the run has failed or was interrupted. No signal interrupts it. Called from another
            thread if the main thread does not return within `termination.GRACE` seconds after a signal.
        restarted: where the run continues if torchrun has restarted it, otherwise None.
    """
    training = Training()

    def last(number: int) -> None:
        result = None if training.engine is None else training.engine.result
        if result is None or result.error is not None:  # a run that has finished keeps its result
            error = None if training.engine is None else training.engine.error
            close(Ended(error=error or Terminated(number), trained=training.trained))

    handler = TerminationHandler(last, launched=torchrun.is_launched())
    handler.is_closing = lambda: training.is_closing
    handler.start()
    try:
        from hydraloop.builder import build  # imports torch

        resumed = restarted or run_directory.settle(cfg, run_dir)
        torchrun.record(run_dir, resumed.checkpoint, began=time.time())
        training.engine = build(cfg, run_dir=run_dir, resumed=resumed)
        training.engine.train()
        ended = Ended(sweep_value(run_dir))
    except BaseException as error:
        training.is_over = True
        ended = Ended(error=error, trained=training.trained)
        close(ended)
    finally:
        handler.stop()
    if handler.received and not isinstance(ended.error, KeyboardInterrupt):  # while the run was closing
        return Ended(error=Terminated(handler.received))
    return ended
