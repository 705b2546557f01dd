"""Options of the hooks that end a run in time: early_stopping, check_invalid_loss, anomaly_detection."""

from dataclasses import dataclass
from typing import ClassVar, Optional, Tuple, Union

from hydra.core.config_store import ConfigStore


@dataclass
class EarlyStoppingHookConf:
    """Ends training once a metric has stopped getting better."""

    default_priority: ClassVar[int] = 100
    mount_points: ClassVar[Tuple[str, ...]] = ("before_run", "before_train", "after_val_epoch", "after_train")
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.EarlyStoppingHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: LOWEST, MMEngine's: the others see the validation first."""
    on_error: Optional[str] = "raise"
    """`raise`, `warn` or `disable`; a run that was to stop and does not is expensive."""
    monitor: Optional[str] = None
    """The metric. Null: the task's first, as with `save_best=auto`. (MMEngine has no default.)"""
    rule: Optional[str] = None
    """`greater` or `less` values are better. Null: derived from the metric's name and from what it declares."""
    min_delta: float = 0.0
    """The least improvement that counts, in the metric's unit, 0 or more. 0: any improvement, since a metric may be in
    0..1, in percent or of another size. MMEngine's 0.1 is for percent."""
    patience: int = 5
    """Validations in a row without an improvement after which training stops, 0 or more; 5 is MMEngine's."""
    strict: bool = False
    """Whether a validation without the metric is an error; false, MMEngine's: a warning. That the task has it at all
    is checked before the first iteration in any case."""
    check_finite: bool = True
    """Whether to stop at NaN or infinity; true, MMEngine's: there is rarely a way back."""
    stopping_threshold: Optional[float] = None
    """Stop at a value beyond this one. Null, MMEngine's: no value is good enough by itself."""


@dataclass
class CheckInvalidLossHookConf:
    """Ends a run whose loss is NaN or infinite, with iteration, samples and parameter norms."""

    default_priority: ClassVar[int] = 50
    mount_points: ClassVar[Tuple[str, ...]] = ("before_train", "after_backward", "before_save_checkpoint")
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.CheckInvalidLossHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: NORMAL, MMDetection's."""
    on_error: Optional[str] = "raise"
    """Only `raise`: ending the run is what it is for, and the ranks ask each other."""
    interval: int = 50
    """Iterations between two looks at the losses, 1 or more; 50 is MMDetection's, since each look is a host sync. All
    losses in between are looked at. 1 ends the run before the weights are NaN too."""


@dataclass
class AnomalyDetectionHookConf:
    """torch's autograd anomaly mode: names the operation whose gradient is NaN."""

    default_priority: ClassVar[int] = 0
    mount_points: ClassVar[Tuple[str, ...]] = ("before_run", "after_run")
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.AnomalyDetectionHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: HIGHEST, iMIX's: on before anybody computes a gradient."""
    on_error: Optional[str] = "raise"
    """`raise`, `warn` or `disable`; a search for an error should not itself go wrong in silence."""
    check_nan: bool = True
    """Whether a NaN in a gradient is an error; true, torch's default. False: only the traceback of the forward pass is
    added to errors of the backward pass, without a host sync for each operation."""


def register(store: ConfigStore) -> None:
    """Store them in the group `hooks`."""
    for name, node in (
        ("early_stopping", EarlyStoppingHookConf),
        ("check_invalid_loss", CheckInvalidLossHookConf),
        ("anomaly_detection", AnomalyDetectionHookConf),
    ):
        store.store(group="hooks", name=name, package=f"hooks.{name}", node=node)
