"""A short training with a tracker, and its followers."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.hooks import LoggerHook, TensorBoardLoggerHook
from tests.helpers import batches, make_engine
from tests.processes import children

NAME = "tracker"


def training(
    run_dir: Path,
    *,
    epochs: int = 2,
    iterations: int = 5,
    more: dict[str, Hook] | None = None,
    tracker: type[TensorBoardLoggerHook] = TensorBoardLoggerHook,
    on_error: Any = "warn",
    **options: Any,
) -> Engine:
    """Make an engine with a logger and TensorBoard, the fastest tracker. By default it logs 13 records."""
    run_dir.mkdir(parents=True, exist_ok=True)
    engine = make_engine(
        run_dir,
        {"logger": LoggerHook(interval=1), NAME: tracker(**options), **(more or {})},
        train=batches(iterations),
        val=batches(1),
        test=batches(1),
        max_epochs=epochs,
    )
    engine.calls._policies[NAME].on_error = on_error
    return engine


def followers(run_dir: Path) -> list[psutil.Process]:
    """Return the followers of a run that were not forked."""
    return [process for process, command in children().items() if str(run_dir) in command]


def until(reached: Callable[[], bool], seconds: float = 90.0) -> None:
    """Wait until something is so."""
    deadline = time.monotonic() + seconds
    while not reached():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.05)
