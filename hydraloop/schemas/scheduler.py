"""The group `scheduler`: torch's own, each under its name, so that several can be selected.

`by_epoch`, `begin`, `end` and `monitor` say when a schedule steps; the rest are the scheduler's own arguments. Steps
are optimizer steps, one in `engine.accumulate` iterations.
"""

from dataclasses import dataclass, field
from typing import List, Optional

from hydra.core.config_store import ConfigStore


@dataclass
class CosineConf:
    """`scheduler=[cosine]`, the default: half a cosine from the learning rate down to `eta_min`."""

    _target_: str = "torch.optim.lr_scheduler.CosineAnnealingLR"
    _partial_: bool = True
    """The optimizer is added when it is there."""
    T_max: Optional[int] = None
    """Length in steps (or epochs); null: from `begin` to `end`, so that the lowest value comes last."""
    eta_min: float = 0.0
    """The lowest learning rate; torch's own."""
    by_epoch: bool = False
    """Whether it counts epochs; optimizer steps make it smooth in short runs too."""
    begin: int = 0
    """The step (or epoch) at which it begins; 0: at once."""
    end: Optional[int] = None
    """The step (or epoch) at which it ends; null: the end of training."""


@dataclass
class LinearConf:
    """`scheduler=[linear]`: a factor of the learning rate goes from one value to another; a warm-up by default."""

    _target_: str = "torch.optim.lr_scheduler.LinearLR"
    _partial_: bool = True
    """The optimizer is added when it is there."""
    start_factor: float = 1 / 3
    """Of the learning rate at `begin`, above 0; torch's own."""
    end_factor: float = 1.0
    """Of the learning rate at `end`; 1, torch's own, is what makes it a warm-up."""
    total_iters: Optional[int] = None
    """Length in steps (or epochs); null: from `begin` to `end`."""
    by_epoch: bool = False
    """Whether it counts epochs; a warm-up is over within the first few."""
    begin: int = 0
    """The step (or epoch) at which it begins; 0: at once."""
    end: Optional[int] = 100
    """The step (or epoch) at which it ends; null: the end of training. 100 steps, a quarter of the 400 of the default
    run."""


@dataclass
class MultiStepConf:
    """`scheduler=[multistep]`: the learning rate times `gamma` at each milestone."""

    _target_: str = "torch.optim.lr_scheduler.MultiStepLR"
    _partial_: bool = True
    """The optimizer is added when it is there."""
    milestones: List[int] = field(default_factory=lambda: [12, 17])
    """Epochs (or steps) after `begin`, ascending; at 60 and 85 % of the default 20 epochs."""
    gamma: float = 0.1
    """The factor, above 0; torch's own."""
    by_epoch: bool = True
    """Whether it counts epochs, in which milestones are usually given; false: optimizer steps."""
    begin: int = 0
    """The epoch (or step) at which it begins; 0: at once."""
    end: Optional[int] = None
    """The epoch (or step) at which it ends; null: the end of training."""


@dataclass
class PlateauConf:
    """`scheduler=[plateau]`: the learning rate times `factor` when a validation metric has stopped improving."""

    _target_: str = "torch.optim.lr_scheduler.ReduceLROnPlateau"
    _partial_: bool = True
    """The optimizer is added when it is there."""
    mode: str = "min"
    """`min` if low values of the metric are good, `max` if high ones are; `min` goes with the loss."""
    factor: float = 0.1
    """The factor, 0..1; torch's own."""
    patience: int = 3
    """Validations without improvement that are put up with; torch's 10 is half of the default 20 epochs."""
    threshold: float = 1e-4
    """The least change that counts as an improvement; torch's own."""
    threshold_mode: str = "rel"
    """`rel`: the threshold is a share of the best value; `abs`: it is in the metric's unit; torch's own."""
    cooldown: int = 0
    """Validations to wait after a reduction; torch's own."""
    min_lr: float = 0.0
    """The lowest learning rate; torch's own."""
    eps: float = 1e-8
    """A reduction smaller than this is left out; torch's own."""
    monitor: str = "loss"
    """The validation metric; the loss is there in every task."""
    by_epoch: bool = True
    """Whether `begin` and `end` count epochs; it steps after each validation in any case."""
    begin: int = 0
    """The epoch (or step) at which it begins; 0: at once."""
    end: Optional[int] = None
    """The epoch (or step) at which it ends; null: the end of training."""


def register(store: ConfigStore) -> None:
    """Store the options of `scheduler`."""
    store.store(group="scheduler", name="cosine", package="scheduler.cosine", node=CosineConf)
    store.store(group="scheduler", name="linear", package="scheduler.linear", node=LinearConf)
    store.store(group="scheduler", name="multistep", package="scheduler.multistep", node=MultiStepConf)
    store.store(group="scheduler", name="plateau", package="scheduler.plateau", node=PlateauConf)
