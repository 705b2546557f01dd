"""Training in this process, without others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from hydraloop.launch import torchrun
from hydraloop.launch.failure import Ended, Terminated
from hydraloop.launch.rank_training import Training
from hydraloop.launch.termination import TerminationHandler
from hydraloop.run.result import sweep_value
from hydraloop.run.resume import Resumed


def train(cfg: DictConfig, run_dir: Path, checkpoint: Path | None, close: Callable[[Ended], None]) -> Ended:
    """Build and train in a single process. SIGTERM and SIGHUP end the run as Ctrl-C does.

    Args:
        checkpoint: where the run continues; None for a new run.
        close: called once when the run has failed or was interrupted. No signal interrupts it. Called from another
            thread if the main thread does not return within `termination.GRACE` seconds after a signal.
    """
    training = Training()

    def last(number: int) -> None:
        result = None if training.engine is None else training.engine.result
        if result is None or result.error is not None:  # a run that has finished keeps its result
            error = None if training.engine is None else training.engine.error
            close(Ended(error=error or Terminated(number), trained=training.has_trained()))

    handler = TerminationHandler(last, launched=torchrun.is_launched())
    handler.is_closing = training.is_closing
    handler.start()
    try:
        from hydraloop.builder import build  # imports torch

        torchrun.remember(run_dir, checkpoint)
        training.engine = build(cfg, run_dir=run_dir, resumed=Resumed(run_dir, checkpoint))
        training.engine.train()
        ended = Ended(sweep_value(run_dir))
    except BaseException as error:
        training.is_over = True
        ended = Ended(error=error, trained=training.has_trained())
        close(ended)
    finally:
        handler.stop()
    if handler.received and not isinstance(ended.error, KeyboardInterrupt):  # while the run was closing
        return Ended(error=Terminated(handler.received))
    return ended
