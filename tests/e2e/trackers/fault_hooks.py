"""A user's hooks that cause faults, and the options of runs with them."""

from __future__ import annotations

HOOKS = '''
from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

import torch

from hydraloop import Hook


class Pictures(Hook):
    """Logs a small picture in each of the first iterations."""

    def __init__(self, *, number: int) -> None:
        self.number = number

    def after_train_iter(self, engine, batch_idx, batch, outputs) -> None:
        if engine.progress.iteration <= self.number:
            engine.log_image("dots", torch.rand(16, 16))


class Until(Hook):
    """Ends training when there is a file `stop`."""

    def after_train_iter(self, engine, batch_idx, batch, outputs) -> None:
        time.sleep(0.02)
        if Path("stop").exists():
            engine.request_stop("there is a file")


class Disk(Hook):
    """Fills a disk after some iterations, and frees it after some more."""

    def __init__(self, *, file: str, full: int, free: int) -> None:
        self.file, self.full, self.free = Path(file), full, free

    def after_train_iter(self, engine, batch_idx, batch, outputs) -> None:
        if engine.progress.iteration == self.full:
            with suppress(OSError), self.file.open("wb", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        if engine.progress.iteration == self.free:
            self.file.unlink()
'''
PICTURES = ("+hooks.pictures._target_=my_project.faults.Pictures", "+hooks.pictures.number=100")
UNTIL = ("+hooks.until._target_=my_project.faults.Until", "engine.max_epochs=10000")
LONG = ("default_hooks.logger.interval=1", "default_hooks.checkpoint=null", "hooks.mlflow.system_metrics=false")
"""A record in each iteration, and no large files."""
