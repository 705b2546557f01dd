"""The group `scheduler`: each option under its name, so that several can be selected.

`param` names the value that a schedule changes, and `optimizer` the optimizer. `by_epoch`, `convert_to_iter_based`,
`begin`, `end` and `monitor` say when it acts. The others are arguments of its function. A step is an optimizer step:
`engine.accumulate` iterations.
"""

from dataclasses import dataclass, field
from typing import Collection, List, Optional

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING

from hydraloop.errors import UserError, suggestion


@dataclass
class _Schedule:
    """The options of every schedule except `plateau`."""

    _target_: str = MISSING
    param: str = "lr"
    """What it changes: lr, momentum (the first beta of Adam), betas, betas.0, weight_decay, … lr is the usual one."""
    optimizer: Optional[str] = None
    """With several optimizers: the name of the one that it changes. Null: all of them, so that they end together."""
    by_epoch: bool = False
    """Whether the numbers count epochs. False: optimizer steps, so that values change smoothly in short runs, too."""
    convert_to_iter_based: bool = False
    """With `by_epoch`: whether the value changes at each optimizer step. False, as in MMEngine: after each epoch."""
    begin: int = 0
    """First step (or epoch) at which it acts. 0: from the start."""
    end: Optional[int] = None
    """First step (or epoch) at which it no longer acts; its last value stays. Null: the end of training."""


@dataclass
class CosineConf(_Schedule):
    """`scheduler=[cosine]`, the default: half a cosine from the learning rate down to `eta_min`."""

    _target_: str = "hydraloop.optim.Cosine"
    T_max: Optional[int] = None
    """Steps (or epochs) down to the lowest value; then it rises again. Null: from `begin` to `end`."""
    eta_min: float = 0.0
    """The lowest value; torch's default."""


@dataclass
class ConstantConf(_Schedule):
    """`scheduler=[constant]`: a share of the learning rate until `end`, then all of it; a simple warm-up."""

    _target_: str = "hydraloop.optim.Constant"
    factor: float = 1 / 3
    """Share of the learning rate in all steps but the last, which has all of it. Above 0, up to 1; torch's default."""
    end: Optional[int] = 100
    """First step (or epoch) at which it no longer acts. Null: the end of training. 100 steps, as in `linear`."""


@dataclass
class ExponentialConf(_Schedule):
    """`scheduler=[exponential]`: the learning rate times `gamma` after each epoch."""

    _target_: str = "hydraloop.optim.Exponential"
    gamma: float = 0.8
    """Factor of each epoch (or step), above 0. 0.8 ends the default 20 epochs at about a hundredth."""
    by_epoch: bool = True
    """Whether the numbers count epochs. True: a factor for each step would depend on the length of the epochs."""
    convert_to_iter_based: bool = False
    """With `by_epoch`: whether the value changes at each optimizer step. False: with true, `gamma` applies to each
    step, as in MMEngine."""


@dataclass
class WarmupCosineConf(_Schedule):
    """`scheduler=[warmup_cosine]`: a straight line up to the learning rate, then half a cosine down."""

    _target_: str = "hydraloop.optim.WarmupCosine"
    total_iters: Optional[int] = None
    """Length in steps (or epochs). Null: from `begin` to `end`."""
    warmup: Optional[int] = None
    """Steps (or epochs) of the warm-up; the next one has the full learning rate. Null: a twentieth of the length, the
    middle of the usual 3 to 10 %, which fits short runs too."""
    start_factor: float = 0.01
    """Share of the learning rate in the first step, above 0, up to 1. Nearly 0, as for transformers; with 0, the first
    step would change nothing."""
    min_lr_ratio: float = 0.0
    """Share of the learning rate at the end, 0..1. 0, as in `cosine`."""


@dataclass
class YOLOXConf(_Schedule):
    """`scheduler=[yolox]`: a quadratic warm-up, a cosine, and the lowest value for the last epochs."""

    _target_: str = "hydraloop.optim.YOLOX"
    total_iters: Optional[int] = None
    """Length in epochs (or steps). Null: from `begin` to `end`."""
    warmup: Optional[int] = None
    """Epochs (or steps) of the warm-up. Null: a sixtieth of the length, YOLOX's 5 of 300 epochs, in proportion."""
    num_last_epochs: Optional[int] = None
    """Epochs (or steps) at the end with the lowest value. Null: a twentieth of the length, YOLOX's 15 of 300 epochs."""
    warmup_ratio: float = 1.0
    """Share of the learning rate at the end of the warm-up, above 0, up to 1; YOLOX's value."""
    min_lr_ratio: float = 0.05
    """Share of the learning rate at the end, 0..1; YOLOX's value."""
    by_epoch: bool = True
    """Whether the numbers count epochs, as in YOLOX. False: optimizer steps."""
    convert_to_iter_based: bool = True
    """With `by_epoch`: whether the value changes at each optimizer step. True, as in YOLOX."""


@dataclass
class LinearConf(_Schedule):
    """`scheduler=[linear]`: the learning rate times a factor that changes in a straight line; a warm-up by default."""

    _target_: str = "hydraloop.optim.Linear"
    start_factor: float = 1 / 3
    """Share of the learning rate at `begin`, above 0, up to 1; torch's default."""
    end_factor: float = 1.0
    """Share of the learning rate in the last step, 0..1. 1, torch's default: a warm-up."""
    total_iters: Optional[int] = None
    """Steps (or epochs) to `end_factor`. Null: `end - begin - 1`, as in MMEngine: the last one has this value."""
    end: Optional[int] = 100
    """First step (or epoch) at which it no longer acts. Null: the end of training. 100 steps, a short warm-up."""


@dataclass
class MomentumConf(LinearConf):
    """`scheduler=[cosine,momentum]`: a warm-up of the momentum, together with a schedule of the learning rate.

    At first the gradients change quickly, and a high momentum keeps the old direction. Sutskever et al. 2013 raise the
    momentum during training, and YOLO's trainers during the warm-up.
    """

    start_factor: float = 0.85
    """Share of the optimizer's momentum at `begin`, above 0, up to 1. Ultralytics' warm-up, 0.8 of 0.937."""
    end_factor: float = 1.0
    """Share of the optimizer's momentum in the last step, 0..1. 1: all of it, for the rest of the training."""
    param: str = "momentum"
    """What it changes: the momentum of SGD and RMSprop, or the first of Adam's betas."""
    end: Optional[int] = 100
    """First step (or epoch) at which it no longer acts. Null: the end of training. 100 steps, as in `linear`."""


@dataclass
class MultiStepConf(_Schedule):
    """`scheduler=[multistep]`: the learning rate times `gamma` at each milestone."""

    _target_: str = "hydraloop.optim.MultiStep"
    milestones: List[int] = field(default_factory=lambda: [12, 17])
    """Epochs (or steps) after `begin`, ascending. At 60 and 85 % of the default 20 epochs."""
    gamma: float = 0.1
    """The factor, above 0; torch's default."""
    by_epoch: bool = True
    """Whether the numbers count epochs, in which milestones are usually given. False: optimizer steps."""


@dataclass
class PolyConf(_Schedule):
    """`scheduler=[poly]`: the learning rate times a power of the share of the training that is left."""

    _target_: str = "hydraloop.optim.Poly"
    total_iters: Optional[int] = None
    """Steps (or epochs) to `eta_min`. Null: `end - begin - 1`, as in MMEngine: the last one has this value."""
    eta_min: float = 0.0
    """The lowest value; MMEngine's default."""
    power: float = 0.9
    """The power, above 0. DeepLab's value, which is usual in segmentation; torch's 1 is a straight line."""


@dataclass
class PlateauConf:
    """`scheduler=[plateau]`: the learning rate times `factor` when a validation metric has stopped improving."""

    _target_: str = "hydraloop.optim.Plateau"
    mode: Optional[str] = None
    """`min` if low values of the metric are good, `max` if high ones are. Null: what the metric declares, so that
    `monitor=accuracy` needs no other option."""
    factor: float = 0.1
    """The factor, between 0 and 1; torch's default."""
    patience: int = 3
    """Validations without improvement that are tolerated. torch's 10 is half of the default 20 epochs."""
    threshold: float = 1e-4
    """The smallest change that counts as an improvement; torch's default."""
    threshold_mode: str = "rel"
    """`rel`: the threshold is a share of the best value. `abs`: it is in the metric's unit. torch's default."""
    cooldown: int = 0
    """Validations to wait after a reduction; torch's default."""
    min_lr: float = 0.0
    """The lowest value; torch's default."""
    eps: float = 1e-8
    """A smaller reduction is not made; torch's default."""
    monitor: str = "loss"
    """The validation metric. Every task has the loss."""
    param: str = "lr"
    """What it changes: lr, momentum (the first beta of Adam), betas, betas.0, weight_decay, … lr is the usual one."""
    optimizer: Optional[str] = None
    """With several optimizers: the name of the one that it changes. Null: all of them, so that they end together."""
    by_epoch: bool = True
    """Whether `begin` and `end` count epochs. False: optimizer steps. In both cases, it acts after validations."""
    begin: int = 0
    """First epoch (or step) after which a validation counts. 0: from the start."""
    end: Optional[int] = None
    """First epoch (or step) after which a validation no longer counts. Null: all count."""


OPTIONS = {
    "constant": ConstantConf,
    "cosine": CosineConf,
    "exponential": ExponentialConf,
    "linear": LinearConf,
    "momentum": MomentumConf,
    "multistep": MultiStepConf,
    "plateau": PlateauConf,
    "poly": PolyConf,
    "warmup_cosine": WarmupCosineConf,
    "yolox": YOLOXConf,
}


def no_such_optimizer(name: object, known: Collection[str], key: str) -> UserError:
    """Return the error for a schedule of an optimizer that is not one of `known`. The name of a single one is empty."""
    single = f"The run has one, without a name: set {key}=null."
    remedy = suggestion(str(name), known) if any(known) else single
    return UserError(f"there is no optimizer {name!r}", key=key, remedy=remedy)


def register(store: ConfigStore) -> None:
    """Store the options of `scheduler`."""
    for name, option in OPTIONS.items():
        store.store(group="scheduler", name=name, package=f"scheduler.{name}", node=option)
