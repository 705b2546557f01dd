"""Options of the hooks that guard a run: early_stopping, check_invalid_loss, anomaly_detection."""

from dataclasses import dataclass
from typing import Optional

from hydra.core.config_store import ConfigStore

from hydraloop.schemas.hook import HookConf, store_hooks


@dataclass
class EarlyStoppingHookConf(HookConf):
    """Ends training when a metric has stopped improving."""

    _target_: str = "hydraloop.hooks.EarlyStoppingHook"
    monitor: Optional[str] = None
    """The metric. Null: the task's first metric, as with `save_best=auto` (MMEngine has no default)."""
    rule: Optional[str] = None
    """Whether `greater` or `less` values are better. Null: derived from what the metric declares and from its name."""
    min_delta: float = 0.0
    """The smallest improvement that counts, in the metric's unit, 0 or more. 0: any improvement counts, because metrics
    differ in scale. MMEngine's 0.1 is meant for percent."""
    patience: int = 5
    """Validations in a row without an improvement after which training stops, 0 or more. 5, as in MMEngine. 0 has the
    same effect as 1."""
    strict: bool = False
    """Whether a validation that does not report the metric is an error. False, as in MMEngine: it is a warning. A
    metric that the task does not declare is always an error before the first iteration."""
    check_finite: bool = True
    """Whether to stop at NaN or infinity. True, as in MMEngine: training rarely recovers."""
    stopping_threshold: Optional[float] = None
    """Stop as soon as a value is better than this one. Null, as in MMEngine: no threshold."""


@dataclass
class CheckInvalidLossHookConf(HookConf):
    """Ends a run whose loss is NaN or infinite and reports the iteration, the samples and the parameter norms."""

    _target_: str = "hydraloop.hooks.CheckInvalidLossHook"
    interval: int = 50
    """Iterations between two checks, at least 1. Each check covers all losses since the previous one. 50, as in
    MMDetection, because a check is a host sync. 1 ends the run before the weights become NaN."""


@dataclass
class AnomalyDetectionHookConf(HookConf):
    """Switches on torch's autograd anomaly mode, which names the operation whose gradient is NaN."""

    _target_: str = "hydraloop.hooks.AnomalyDetectionHook"
    check_nan: bool = True
    """Whether a NaN in a gradient is an error. True, torch's default. False only adds the traceback of the forward pass
    to errors of the backward pass, and costs no host syncs. Use false with precision=fp16, where scaled gradients
    may overflow by design."""


def register(store: ConfigStore) -> None:
    """Store them in the group `hooks`."""
    store_hooks(
        store,
        early_stopping=EarlyStoppingHookConf,
        check_invalid_loss=CheckInvalidLossHookConf,
        anomaly_detection=AnomalyDetectionHookConf,
    )
