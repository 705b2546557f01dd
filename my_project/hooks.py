"""A custom hook: a class that overrides mount points."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from hydraloop import Hook

if TYPE_CHECKING:
    from hydraloop import Engine

log = logging.getLogger(__name__)


class MyHook(Hook):
    """Logs the norm of all weights after each epoch. One host sync per epoch.

    Args:
        digits: number of digits after the decimal point.
    """

    priority = 60

    def __init__(self, *, digits: int = 3) -> None:
        self.digits = digits

    def after_train_epoch(self, engine: Engine) -> None:
        with torch.no_grad():
            norm = torch.nn.utils.get_total_norm(engine.model.parameters())
        log.info("epoch %d: weight norm %.*f", engine.progress.epoch, self.digits, norm.item())
