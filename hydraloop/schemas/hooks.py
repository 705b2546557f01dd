"""Options of all hooks, and of the hooks that act on training: on its weights, its data, its device and its end."""

from dataclasses import dataclass
from typing import Any, ClassVar, List, Optional, Tuple, Union

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING


@dataclass
class HookConf:
    """Base of the options of a hook. A subclass sets `_target_`."""

    functions: ClassVar[Tuple[str, ...]] = ()
    """Options that are functions: one that `_target_` names is given to the hook, not called."""

    _target_: str = MISSING
    priority: Optional[Union[int, str]] = None
    """When the hook is called at each mount point: from 0 (first) to 100 (last), or a name such as HIGH. Null: the
    default of its class."""
    on_error: Optional[str] = "raise"
    """What happens when the hook fails: `raise` ends the run, `warn` logs the error and continues, `disable` also
    switches the hook off. Hooks that only observe default to `warn`: a failed chart should not end a training. The
    others default to `raise`: without them it would be a different training. Hooks that communicate with other ranks
    can only raise, because the other ranks would wait for them."""


def store_hooks(store: ConfigStore, group: str = "hooks", **options: type) -> None:
    """Store dataclasses under their names as options of `group`, which is `hooks` or `default_hooks`."""
    for name, option in options.items():
        store.store(group=group, name=name, package=f"{group}.{name}", node=option)


@dataclass
class CheckpointHookConf(HookConf):
    """Writes checkpoints: at an interval, at the end of training, and for the best validation."""

    _target_: str = "hydraloop.hooks.CheckpointHook"
    interval: Optional[int] = 1
    """Epochs (or iterations) between two regular checkpoints, at least 1. 1, as in MMEngine. Null: only the last and
    the best."""
    by_epoch: bool = True
    """Whether `interval` and `save_begin` count epochs, as in MMEngine, or iterations."""
    min_time: Any = None
    """Least time between two regular checkpoints: `6h`, `0:30:00`, or seconds. One that comes earlier, or while a save
    is running, is left out. The best and the end of training are always saved. After a failed save, the next one is not
    left out. Null: none is left out, as in MMEngine."""
    max_keep_ckpts: Optional[int] = None
    """Number of regular checkpoints to keep, the newest, at least 1; the best ones are not counted. Null: all, so that
    nothing is deleted unless you ask for it."""
    save_best: Any = None
    """Metrics whose best checkpoint is kept: a name, or a list of names, each with its own file. `auto` or true: the
    first of `sweep.objectives`, otherwise the task's first metric, if the run validates and it is known which values
    are better. NaN and infinity are never the best. Null, MMEngine's default, or false: none."""
    rule: Any = None
    """Whether `greater` or `less` values are better; a list has one entry for each name in `save_best`. Null: derived
    from `greater_keys`, `less_keys` and what the metric declares."""
    greater_keys: Optional[List[str]] = None
    """Names, or parts of names, of metrics whose high values are good. Null: MMEngine's list (acc, top, auc, mAP,
    …)."""
    less_keys: Optional[List[str]] = None
    """Names, or parts of names, of metrics whose low values are good. Null: MMEngine's list (loss)."""
    out_dir: Optional[str] = None
    """Folder for the files: absolute, from `~`, or relative to the working directory. Null: `checkpoints` in the run
    directory, so that a run stays in one place."""
    published_keys: Optional[List[str]] = None
    """Entries to keep in `<name>_published.pth` ([meta,state_dict]), written after training for the last and each best
    checkpoint; the weights also as `.safetensors`. `state_dict` is the averaged weights if there are any, unless
    `weights=raw`. A run cannot be resumed from them. Null: none; only a run to be published needs them."""
    save_last: bool = True
    """Whether to write a checkpoint at the end of training, regardless of the interval. True: a run should leave its
    weights."""
    save_begin: int = 0
    """First epoch (or iteration) that the interval counts from. 0: from the start."""
    save_optimizer: bool = True
    """Whether to save the optimizer's state. True: other files can only be resumed with `resume_strict=false`."""
    save_param_scheduler: bool = True
    """Whether to save the state of the schedules. True: other files can only be resumed with `resume_strict=false`."""
    asynchronous: bool = True
    """Whether a thread writes the files. True: training waits for a copy in memory only, not for the disk."""


@dataclass
class EMAHookConf(HookConf):
    """Averages the weights, and validates and tests on the average; training is unchanged."""

    functions: ClassVar[Tuple[str, ...]] = ("weight",)

    _target_: str = "hydraloop.hooks.EMAHook"
    ema_type: str = "exponential"
    """`exponential` (MMEngine's default), `stochastic` (a plain mean), `momentum_annealing`, `exp_momentum` or
    `linear_momentum`."""
    momentum: float = 0.0002
    """Share of the new weights in each update, in (0, 1). MMEngine's default; it averages over about
    1 / 0.0002 = 5000 steps."""
    warmup: bool = True
    """Whether the share starts larger, as max(momentum, 9 / (10 + updates)); for `exponential` only. Without it, the
    average of a short run would mostly consist of its initial weights."""
    interval: int = 1
    """Optimizer steps (epochs with `by_epoch`) between two updates, at least 1. 1, as in MMEngine; an update is one
    small kernel. The first update is at step `interval`; MMEngine copies the weights at step 1."""
    by_epoch: bool = False
    """Whether to update at the end of epochs. False, as in MMEngine: after optimizer steps."""
    begin_epoch: int = 0
    """Epoch (from 1) of the first update: at its first optimizer step, with `by_epoch` at its end. The interval counts
    from there. 0 and 1: from the start. Use this or `begin_iter`."""
    begin_iter: int = 0
    """Optimizer step (from 1) of the first update; the interval counts from there. 0 and 1: from the start."""
    update_buffers: bool = False
    """Whether to average floating-point buffers too (statistics of normalisation layers); others are copied. False, as
    in MMEngine: the average uses the raw model's buffers. With several ranks rank 0's average is used, or with
    `sync_norm` or `sync_buffers` the mean over the ranks."""
    gamma: Optional[float] = None
    """Optimizer steps in which `momentum_annealing` and `exp_momentum` approach `momentum`, above 0; for these two
    only. Null: OpenMMLab's 100 and 2000."""
    warm_up_steps: int = 100
    """`linear_momentum` begins with the share 1 / `warm_up_steps` and grows to `momentum` if that is larger. At least
    1; for this type only. MMDetection's default."""
    weight: Any = None
    """A custom formula, a node with `_target_`: a function of the average, the weights and the number of updates that
    returns the new average, called for each tensor. It replaces `ema_type` and its options. Null: the usual
    formulas."""


@dataclass
class ParamSchedulerHookConf(HookConf):
    """Applies the schedules of the learning rate and other values."""

    _target_: str = "hydraloop.hooks.ParamSchedulerHook"


@dataclass
class GradClipHookConf(HookConf):
    """Clips the gradients before each optimizer step; off while `max_norm` and `clip_value` are null."""

    _target_: str = "hydraloop.hooks.GradClipHook"
    max_norm: Optional[float] = None
    """Maximum norm of all gradients together, above 0; larger gradients are scaled down. Null: off, as in MMEngine; 1.0
    is usual for transformers."""
    norm_type: float = 2.0
    """Order of the norm, above 0; `inf` is the largest entry. 2, torch's default, is the Euclidean norm. With fsdp2,
    torch fails for `inf` if a rank has no part of a parameter."""
    clip_value: Optional[float] = None
    """Maximum absolute value of each entry, above 0. Null: off. Use this or `max_norm`."""
    skip_nonfinite: bool = False
    """Whether to skip an optimizer step whose gradient norm is NaN or infinite, also without `max_norm`. After 10 in a
    row, the run fails. False, because the check is a host sync in every step. fp16 skips such steps anyway."""


@dataclass
class FreezeHookConf(HookConf):
    """Trains without some modules, for a number of epochs or iterations or for the whole run."""

    _target_: str = "hydraloop.hooks.FreezeHook"
    modules: Optional[List[str]] = None
    """Modules of `task.model`, with everything inside, and single parameters: names (`backbone`), globs (`layers.*`),
    or `re:` and a regular expression. Several hooks of this class must have separate modules. Required, because no
    choice fits every model."""
    epochs: Optional[int] = None
    """Epochs without them, at least 1. Null: see `iters`. Use this or `iters`."""
    iters: Optional[int] = None
    """Iterations without them, at least 1; with `engine.accumulate`, until the accumulation window ends. If both are
    null, the modules are frozen for the whole run."""
    norm_eval: bool = True
    """Whether normalisation layers in them use and keep their running statistics, as in MMDetection's backbones.
    True: otherwise frozen weights would get other inputs than they were trained with."""


@dataclass
class DistSamplerSeedHookConf(HookConf):
    """Shuffles the data differently in each epoch, by (seed, epoch)."""

    _target_: str = "hydraloop.hooks.DistSamplerSeedHook"


@dataclass
class ModeSwitchHookConf(HookConf):
    """Switches off strong augmentations and switches on an extra loss for the last epochs."""

    _target_: str = "hydraloop.hooks.ModeSwitchHook"
    num_last_epochs: int = 15
    """Number of last epochs, at least 1. 15 of 300, as in YOLOX and MMDetection. A run with fewer epochs is in this
    mode from its start; with `engine.max_iters`, a partial last epoch counts as one."""


@dataclass
class SyncRandomSizeHookConf(HookConf):
    """Multi-scale training: a new input size every few iterations, the same on every rank."""

    _target_: str = "hydraloop.hooks.SyncRandomSizeHook"
    interval: int = 10
    """Iterations at one size, at least 1. 10, as in YOLOX and MMDetection's BatchSyncRandomResize."""
    min_ratio: float = 0.7
    """Smallest height as a share of the data's height, above 0. MMDetection: 14 * 32 of 640 pixels."""
    max_ratio: float = 1.3
    """Largest height as a share of the data's height, at least `min_ratio`. MMDetection: 26 * 32 of 640 pixels."""
    divisor: int = 1
    """Heights and widths are multiples of this number. 1 allows any size, which small images need; detectors
    usually need 32, MMDetection's value."""


@dataclass
class SetEpochInfoHookConf(HookConf):
    """Calls `set_epoch(epoch)` of the task, the model and the train data set, if they have it."""

    _target_: str = "hydraloop.hooks.SetEpochInfoHook"


@dataclass
class NumClassCheckHookConf(HookConf):
    """Rejects, before the first iteration, a model whose number of classes differs from that of the data sets."""

    _target_: str = "hydraloop.hooks.NumClassCheckHook"
    ignore: Optional[List[str]] = None
    """Modules, given by the end of their name in the task (`roi_head.mask_head`), whose `num_classes` has another
    meaning. Null: `rpn_head`, as in MMDetection: it separates objects from background. A name that matches no module
    with a number of classes is a warning."""


@dataclass
class EmptyCacheHookConf(HookConf):
    """Returns unused cached memory to the device."""

    _target_: str = "hydraloop.hooks.EmptyCacheHook"
    before_epoch: bool = False
    """Whether to empty the cache before each train, val and test epoch. False, as in MMEngine: the end of the previous
    epoch is nearly the same moment."""
    after_epoch: bool = True
    """Whether to empty it after each train, val and test epoch. True, as in MMEngine: what follows needs other
    sizes."""
    after_iter: bool = False
    """Whether to empty it after each iteration. False, as in MMEngine: every iteration would wait for the device and
    allocate its memory again."""


@dataclass
class SyncBuffersHookConf(HookConf):
    """Averages all buffers of the model over the ranks at the end of each epoch."""

    _target_: str = "hydraloop.hooks.SyncBuffersHook"
    norm_only: bool = False
    """Whether to average only the running statistics of normalisation layers, and only before an evaluation. False, as
    in MMEngine: checkpoints have the averages too."""


@dataclass
class SyncNormHookConf(SyncBuffersHookConf):
    """Averages the running statistics of normalisation layers over the ranks before each evaluation."""

    norm_only: bool = True
    """Whether to average only the running statistics of normalisation layers, and only before an evaluation. True, as
    in MMDetection's SyncNormHook."""


@dataclass
class EarlyStoppingHookConf(HookConf):
    """Ends training when a metric has stopped improving."""

    _target_: str = "hydraloop.hooks.EarlyStoppingHook"
    monitor: Optional[str] = None
    """The metric. Null: the objective, which is the first metric of `save_best`, otherwise of `sweep.objectives`,
    otherwise of the task (MMEngine has no default)."""
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


def last_and_best() -> CheckpointHookConf:
    """Return what `hydraloop/project` selects: a run of thousands of short epochs leaves two files.

    10s: with epochs of milliseconds, saving takes less than a hundredth of the time.
    """
    return CheckpointHookConf(min_time="10s", max_keep_ckpts=1, save_best="auto")


def register(store: ConfigStore) -> None:
    """Store them in the groups `default_hooks` and `hooks`."""
    store.store(group="default_hooks", name="last_and_best", package="default_hooks.checkpoint", node=last_and_best)
    store_hooks(
        store,
        "default_hooks",
        checkpoint=CheckpointHookConf,
        param_scheduler=ParamSchedulerHookConf,
        grad_clip=GradClipHookConf,
        sampler_seed=DistSamplerSeedHookConf,
    )
    store_hooks(
        store,
        ema=EMAHookConf,
        freeze=FreezeHookConf,
        mode_switch=ModeSwitchHookConf,
        sync_random_size=SyncRandomSizeHookConf,
        set_epoch_info=SetEpochInfoHookConf,
        num_class_check=NumClassCheckHookConf,
        empty_cache=EmptyCacheHookConf,
        sync_buffers=SyncBuffersHookConf,
        sync_norm=SyncNormHookConf,
        early_stopping=EarlyStoppingHookConf,
        check_invalid_loss=CheckInvalidLossHookConf,
        anomaly_detection=AnomalyDetectionHookConf,
    )
