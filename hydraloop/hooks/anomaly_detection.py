"""AnomalyDetectionHook: torch's autograd anomaly mode, which names the operation whose gradient is NaN."""

from __future__ import annotations

import logging

import torch

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook, Priority

log = logging.getLogger(__name__)


class AnomalyDetectionHook(Hook):
    """Switches on torch's autograd anomaly mode, for debugging.

    If a backward function returns NaN, the run ends with an error that names the function (`check_nan`). For an error
    in the backward pass, a warning shows where the forward pass called the operation. The mode applies to the whole
    process. Its previous state is restored at the end of the run, also after an error.

    Priority HIGHEST, iMIX's (AutogradAnomalyDetectHook, which switches the mode on in each iteration). Cost: every
    forward operation stores its Python stack, and with `check_nan` each backward function needs a host sync; a run may
    be several times slower. No state. Options: `AnomalyDetectionHookConf`.
    """

    priority = Priority.HIGHEST

    def __init__(self, *, check_nan: bool = True) -> None:
        self.check_nan = check_nan
        self._before: tuple[bool, bool] | None = None

    def before_run(self, engine: Engine) -> None:
        self._before = (torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled())
        torch.autograd.set_detect_anomaly(True, self.check_nan)
        log.warning("%s: autograd's anomaly mode is on, which makes training slow", self.key)

    def after_run(self, engine: Engine) -> None:
        if self._before is not None:
            (enabled, check_nan), self._before = self._before, None
            torch.autograd.set_detect_anomaly(enabled, check_nan)
