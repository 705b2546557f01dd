"""Training in this process, with nothing launched."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from hydraloop.launch import torchrun
from hydraloop.launch.job_result import Ended
from hydraloop.launch.outcome import Terminated
from hydraloop.launch.termination import Ending
from hydraloop.launch.training import Training, value_of
from hydraloop.run import directory as run_directory


def train(
    cfg: DictConfig, run_dir: Path, close: Callable[[Ended], None], restarted: run_directory.Resumed | None = None
) -> Ended:
    """Build and train. SIGTERM and SIGHUP end the run as Ctrl-C does.

    Args:
        close: called once when the run has failed or was interrupted. While it runs, no signal interrupts it. Called
            from another thread if the main thread does not come back within `ending.GRACE` seconds after a signal.
        restarted: where torchrun's restart of the run continues; None: it is no restart.
    """
    training = Training()

    def last(number: int) -> None:
        result = None if training.engine is None else training.engine.result
        if result is None or result.error is not None:  # a run that has finished keeps its result
            error = None if training.engine is None else training.engine.error
            close(Ended(error=error or Terminated(number), trained=training.trained))

    ending = Ending(last, launched=torchrun.is_launched())
    ending.is_closing = lambda: training.is_closing
    ending.start()
    try:
        from hydraloop.builder import build  # torch is imported here

        resumed = restarted or run_directory.settle(cfg, run_dir)
        torchrun.record(run_dir, resumed.checkpoint, began=time.time())
        training.engine = build(cfg, run_dir=run_dir, resumed=resumed)
        ended = Ended(value_of(training.engine.train()))
    except BaseException as error:
        training.is_over = True
        ended = Ended(error=error, trained=training.trained)
        close(ended)
    finally:
        ending.stop()
    if ending.asked and not isinstance(ended.error, KeyboardInterrupt):  # in the middle of closing
        return Ended(error=Terminated(ending.asked))
    return ended
