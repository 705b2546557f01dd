"""The options of the engine. `Settings.training_length` converts epochs to iterations."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydraloop.engine.progress import Progress


@dataclass(frozen=True, slots=True)
class Settings:
    """The options of the engine; `hydraloop.schemas.engine.EngineConf` gives the reasons of the defaults."""

    max_epochs: int = 20
    max_iters: int | None = None
    accumulate: int = 1
    val_interval: int | None = 1
    val_begin: int = 0
    val_by_epoch: bool = True
    test: bool = True
    device: str = "auto"
    peak_tflops: float | None = None
    prefetch: bool = True
    verbose: bool = False
    channels_last: bool = False
    """Whether images are stored channels last on the device."""
    resume: Path | None = None
    """The checkpoint file to resume from."""
    resume_strict: bool = True
    optimizer_overrides: frozenset[str] = frozenset()
    """Hyperparameters (`lr`) whose values in the config replace those of the resumed checkpoint."""
    load_from: Path | None = None
    """A checkpoint file or state dict to take weights from."""
    weights: str = "averaged"
    """`averaged` or `raw`: which weights `load_from`, validation and test use if there are both."""
    metadata: Mapping[str, Any] = field(default_factory=dict)
    """Plain values for every checkpoint's `meta` (the config, the experiment's name)."""

    def training_length(self, epoch_length: int, progress: Progress) -> tuple[int, int]:
        """Return how many (iterations, epochs) the whole run has.

        Args:
            epoch_length: iterations in an epoch; epochs that are already completed may have had another length.
            progress: where the run is now.
        """
        epoch_began_at = progress.iteration - progress.batch_in_epoch
        if self.max_iters is None:
            return epoch_began_at + max(self.max_epochs - progress.epoch, 0) * epoch_length, self.max_epochs
        left = max(self.max_iters - epoch_began_at, 0)
        return self.max_iters, progress.epoch + -(-left // max(epoch_length, 1))
