"""The hook of the project whose sweeps are killed, a ledger of what each job does, and a sampler.

The ledger knows nothing of the files with which a sweep tells its jobs apart.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import hydraloop


def _process() -> int:
    """Identify this process. Two nodes of the Slurm of the tests may have the same ids."""
    job = os.environ.get("SLURM_JOB_ID", "")
    return int(f"{job}{os.environ.get('SLURM_RESTART_COUNT', '0')}{os.getpid():07}") if job else os.getpid()


def nsga2(seed: int) -> Any:
    """Return a sampler whose generations have four trials."""
    from optuna.samplers import NSGAIISampler

    return NSGAIISampler(population_size=4, seed=seed)


class Ledger(hydraloop.Hook):
    """Appends `<job> <process> <event>` to a file that all jobs share. Appending keeps the order of all events."""

    priority = hydraloop.Priority.VERY_LOW
    rank_zero_only = True

    def __init__(self, *, path: str, job: int, together: bool = False) -> None:
        self.path, self.job = path, job
        self.together = together
        """Whether an attempt waits, at most a minute, until a second one has begun."""

    def _note(self, event: str) -> None:
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(file, f"{self.job} {_process()} {event}\n".encode())
        os.close(file)

    def before_run(self, engine: hydraloop.Engine) -> None:
        """An attempt begins."""
        self._note("begin")
        until = time.monotonic() + 60
        while self.together and time.monotonic() < until and Path(self.path).read_text().count(" begin\n") < 2:
            time.sleep(0.01)

    def after_train_iter(self, engine: hydraloop.Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        """Leaves time for a kill."""
        self._note(f"iteration {engine.progress.iteration}")
        time.sleep(0.003)

    def before_save_checkpoint(self, engine: hydraloop.Engine, checkpoint: dict[str, Any]) -> None:
        """The file is written next."""
        self._note("save")

    def after_train(self, engine: hydraloop.Engine) -> None:
        """`result.json` is written next."""
        if engine.error is None:
            self._note("trained")

    def after_run(self, engine: hydraloop.Engine) -> None:
        """`result.json` is written. Ranks whose launcher was killed save and are interrupted."""
        if engine.outcome.result is not None and engine.outcome.result.status == "finished":
            self._note("done")
