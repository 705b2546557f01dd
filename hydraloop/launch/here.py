"""Training in this process, with nothing launched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from hydraloop.launch.ended import Ended
from hydraloop.launch.training import value_of


def train(cfg: DictConfig, run_dir: Path) -> Ended:
    """Build and train."""
    engine: Any = None
    try:
        from hydraloop.builder import build  # torch is imported here

        engine = build(cfg, run_dir=run_dir)
        return Ended(value_of(engine.train()))
    except BaseException as error:
        return Ended(error=error, trained=engine is not None and engine.progress.iteration > engine.began_at)
