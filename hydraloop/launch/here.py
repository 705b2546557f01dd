"""Training in this process, with nothing launched."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from hydraloop import run_directory
from hydraloop.launch import torchrun
from hydraloop.launch.ended import Ended
from hydraloop.launch.training import value_of


def train(cfg: DictConfig, run_dir: Path, restarted: run_directory.Resumed | None = None) -> Ended:
    """Build and train.

    Args:
        restarted: where torchrun's restart of the run continues; None: it is no restart.
    """
    engine: Any = None
    try:
        from hydraloop.builder import build  # torch is imported here

        resumed = restarted or run_directory.settle(cfg, run_dir)
        torchrun.record(run_dir, resumed.checkpoint, began=time.time())
        engine = build(cfg, run_dir=run_dir, resumed=resumed)
        return Ended(value_of(engine.train()))
    except BaseException as error:
        return Ended(error=error, trained=engine is not None and engine.progress.iteration > engine.began_at)
