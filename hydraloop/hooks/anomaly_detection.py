"""AnomalyDetectionHook: torch's autograd anomaly mode, which names the operation whose gradient is NaN."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from hydraloop.engine.hook import Hook, Priority

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)


class AnomalyDetectionHook(Hook):
    """Runs with torch's autograd anomaly mode on, for debugging.

    A backward function that returns a NaN ends the run with an error that names it (`check_nan`), and an error in the
    backward pass comes with a warning that shows where in the forward pass its operation was called. The mode is global
    to the process: what it was before is there again when the run has ended, however it ended.

    Mount points: before_run, after_run. Priority HIGHEST, iMIX's (its AutogradAnomalyDetectHook switches it on for each
    iteration; here once a run). Cost: every forward operation keeps its Python stack, and with `check_nan` every
    backward function is followed by a look at its result, a host sync each: expect a run several times slower.
    No state.

    Args:
        check_nan: raise where a gradient is NaN; False: only show where failing operations came from. With
            precision=fp16 scaled gradients may overflow by design, and infinities can turn into NaN.
    """

    priority = Priority.HIGHEST

    def __init__(self, *, check_nan: bool = True) -> None:
        self.check_nan = check_nan
        self._before: tuple[bool, bool] | None = None

    def before_run(self, engine: Engine) -> None:
        """Switch it on, and remember what was on before."""
        self._before = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        torch.autograd.set_detect_anomaly(True, self.check_nan)
        log.warning("%s: autograd's anomaly mode is on, which makes training slow", self.key)

    def after_run(self, engine: Engine) -> None:
        """Put back what was on before."""
        if self._before is not None:
            (enabled, check_nan), self._before = self._before, None
            torch.autograd.set_detect_anomaly(enabled, check_nan)
