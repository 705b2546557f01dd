"""The group `scheduler`: each option under its name, so that several can be selected.

`param` says what a schedule changes; `by_epoch`, `convert_to_iter_based`, `begin`, `end` and `monitor` say when it
acts; the rest are arguments of its function. Steps are optimizer steps, one in `engine.accumulate` iterations.
"""

from dataclasses import dataclass, field
from typing import Any, List, Optional

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class _Schedule:
    """What every schedule has that follows no metric."""

    _target_: str = MISSING
    param: str = "lr"
    """What it changes: lr, momentum (the first beta of Adam), betas, betas.0, weight_decay; the lr is the usual one."""
    by_epoch: bool = False
    """Whether the numbers count epochs; false: optimizer steps, smooth in short runs too."""
    convert_to_iter_based: bool = False
    """With `by_epoch`: whether the value changes at each optimizer step; false, since the numbers count steps here."""
    begin: int = 0
    """The first step (or epoch) at which it acts; 0: the first of all."""
    end: Optional[int] = None
    """The step (or epoch) before which it acts for the last time; null: the end of training."""


@dataclass
class CosineConf(_Schedule):
    """`scheduler=[cosine]`, the default: half a cosine from the learning rate down to `eta_min`."""

    _target_: str = "hydraloop.optim.Cosine"
    T_max: Optional[int] = None
    """Steps (or epochs) down to the lowest value, after which it rises again; null: from `begin` to `end`."""
    eta_min: float = 0.0
    """The lowest value; torch's own."""


@dataclass
class WarmupCosineConf(_Schedule):
    """`scheduler=[warmup_cosine]`: a straight line up to the learning rate, then half a cosine down."""

    _target_: str = "hydraloop.optim.WarmupCosine"
    total_iters: Optional[int] = None
    """Length in steps (or epochs); null: from `begin` to `end`."""
    warmup_iters: Optional[int] = None
    """Steps (or epochs) of the warm-up; null: a twentieth of the length, the middle of the usual 3 to 10 %, which fits
    short runs too."""
    start_factor: float = 0.01
    """Share of the learning rate in the first step, above 0, up to 1; nearly 0, as transformers are warmed up: with 0
    the first step would be lost."""
    min_lr_ratio: float = 0.0
    """Share of the learning rate at the end, 0..1; 0, as in `cosine`."""


@dataclass
class YOLOXConf(_Schedule):
    """`scheduler=[yolox]`: a warm-up with the square of the step, a cosine, the lowest value for the last epochs."""

    _target_: str = "hydraloop.optim.YOLOX"
    total_iters: Optional[int] = None
    """Length in epochs (or steps); null: from `begin` to `end`."""
    warmup_iters: Optional[int] = None
    """Epochs (or steps) of the warm-up; null: a sixtieth of the length: YOLOX's 5 of 300 epochs, and in proportion in
    other runs."""
    num_last_epochs: Optional[int] = None
    """Epochs (or steps) at the end with the lowest value; null: a twentieth of the length: YOLOX's 15 of 300 epochs."""
    warmup_ratio: float = 1.0
    """Share of the learning rate with which the warm-up ends, above 0, up to 1; YOLOX's own."""
    min_lr_ratio: float = 0.05
    """Share of the learning rate at the end, 0..1; YOLOX's own."""
    by_epoch: bool = True
    """Whether the numbers count epochs, as YOLOX's do; false: optimizer steps."""
    convert_to_iter_based: bool = True
    """With `by_epoch`: whether the value changes at each optimizer step; YOLOX's does."""


@dataclass
class LinearConf(_Schedule):
    """`scheduler=[linear]`: a factor of the learning rate goes from one value to another; a warm-up by default."""

    _target_: str = "hydraloop.optim.Linear"
    start_factor: float = 1 / 3
    """Of the learning rate at `begin`, above 0; torch's own."""
    end_factor: float = 1.0
    """Of the learning rate in its last step; 1, torch's own, is what makes it a warm-up."""
    total_iters: Optional[int] = None
    """Steps (or epochs) to `end_factor`; null: `end - begin - 1`, MMEngine's, so that the last one has it."""
    end: Optional[int] = 100
    """The step (or epoch) before which it acts for the last time; null: the end of training. 100 steps, a quarter of
    the 400 of the default run."""


@dataclass
class MomentumConf(_Schedule):
    """`scheduler=[cosine,momentum]`: a warm-up of the momentum, beside a schedule of the learning rate.

    The first gradients soon point elsewhere, and a high momentum goes on carrying them along: Sutskever et al. 2013
    raise it with the training, as YOLO's trainers do in their warm-up.
    """

    _target_: str = "hydraloop.optim.Linear"
    start_factor: float = 0.85
    """Of the optimizer's momentum at `begin`, above 0; Ultralytics' warm-up, 0.8 of 0.937."""
    end_factor: float = 1.0
    """Of the optimizer's momentum in its last step; 1: all of it, for the rest of the training."""
    total_iters: Optional[int] = None
    """Steps (or epochs) to `end_factor`; null: `end - begin - 1`, as in `linear`."""
    param: str = "momentum"
    """What it changes: SGD's and RMSprop's momentum, the first of the betas of Adam and its kind."""
    end: Optional[int] = 100
    """The step (or epoch) before which it acts for the last time; null: the end of training. 100 steps, together with
    `linear`."""


@dataclass
class MultiStepConf(_Schedule):
    """`scheduler=[multistep]`: the learning rate times `gamma` at each milestone."""

    _target_: str = "hydraloop.optim.MultiStep"
    milestones: List[int] = field(default_factory=lambda: [12, 17])
    """Epochs (or steps) after `begin`, ascending; at 60 and 85 % of the default 20 epochs."""
    gamma: float = 0.1
    """The factor, above 0; torch's own."""
    by_epoch: bool = True
    """Whether the numbers count epochs, in which milestones are usually given; false: optimizer steps."""
    convert_to_iter_based: bool = False
    """With `by_epoch`: whether the value changes at each optimizer step; false, since little would change."""


@dataclass
class OneCycleConf(_Schedule):
    """`scheduler=[onecycle]`: up from a low learning rate and down to a far lower one, the momentum the other way."""

    _target_: str = "hydraloop.optim.OneCycle"
    max_lr: Any = None
    """The highest learning rate, or a list of one for each parameter group; null: the optimizer's, so that it means the
    same in all schedules."""
    total_steps: Optional[int] = None
    """Length in steps (or epochs); null: from `begin` to `end`, so that the lowest value comes last."""
    pct_start: float = 0.3
    """Share of the length that goes up, 0..1; torch's own."""
    anneal_strategy: str = "cos"
    """`cos` or `linear`; torch's own."""
    cycle_momentum: bool = True
    """Whether it changes the momentum (Adam's first beta) as well, which is part of the method; torch's own. Not
    if `param` is another than lr."""
    base_momentum: float = 0.85
    """The momentum at the highest learning rate; torch's own."""
    max_momentum: float = 0.95
    """The momentum at the lowest; torch's own."""
    div_factor: float = 25.0
    """`max_lr` divided by the first learning rate, above 0; torch's own."""
    final_div_factor: float = 1e4
    """The first learning rate divided by the last, above 0; torch's own."""
    three_phase: bool = False
    """Whether it goes down to the first learning rate and then on to the last; torch's own."""


@dataclass
class PolyConf(_Schedule):
    """`scheduler=[poly]`: the learning rate times a power of the share of the training that is left."""

    _target_: str = "hydraloop.optim.Poly"
    total_iters: Optional[int] = None
    """Steps (or epochs) to `eta_min`; null: `end - begin - 1`, MMEngine's, so that the last one has it."""
    eta_min: float = 0.0
    """The lowest value; MMEngine's own."""
    power: float = 0.9
    """The power, above 0; DeepLab's, which segmentation has kept. torch's 1 is a straight line."""


@dataclass
class PlateauConf:
    """`scheduler=[plateau]`: the learning rate times `factor` when a validation metric has stopped improving."""

    _target_: str = "hydraloop.optim.Plateau"
    mode: Optional[str] = None
    """`min` if low values of the metric are good, `max` if high ones are; null: what the metric itself says, so that
    `monitor=accuracy` needs nothing more."""
    factor: float = 0.1
    """The factor, between 0 and 1; torch's own."""
    patience: int = 3
    """Validations without improvement that are put up with; torch's 10 is half of the default 20 epochs."""
    threshold: float = 1e-4
    """The least change that counts as an improvement; torch's own."""
    threshold_mode: str = "rel"
    """`rel`: the threshold is a share of the best value; `abs`: it is in the metric's unit; torch's own."""
    cooldown: int = 0
    """Validations to wait after a reduction; torch's own."""
    min_lr: float = 0.0
    """The lowest value; torch's own."""
    eps: float = 1e-8
    """A reduction smaller than this is left out; torch's own."""
    monitor: str = "loss"
    """The validation metric; the loss is there in every task."""
    param: str = "lr"
    """What it changes: lr, momentum (the first beta of Adam), betas, betas.0, weight_decay; the lr is the usual one."""
    by_epoch: bool = True
    """Whether `begin` and `end` count epochs; it looks at each validation in any case."""
    begin: int = 0
    """The first epoch (or step) after which it looks at a validation; 0: the first of all."""
    end: Optional[int] = None
    """The epoch (or step) from which it looks at no validation; null: never."""


OPTIONS = {
    "cosine": CosineConf,
    "linear": LinearConf,
    "momentum": MomentumConf,
    "multistep": MultiStepConf,
    "onecycle": OneCycleConf,
    "plateau": PlateauConf,
    "poly": PolyConf,
    "warmup_cosine": WarmupCosineConf,
    "yolox": YOLOXConf,
}


def register(store: ConfigStore) -> None:
    """Store the options of `scheduler`."""
    for name, option in OPTIONS.items():
        store.store(group="scheduler", name=name, package=f"scheduler.{name}", node=option)
