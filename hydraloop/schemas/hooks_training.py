"""Options of the hooks of training: checkpoint, ema, param_scheduler, grad_clip, freeze, sampler_seed."""

from dataclasses import dataclass
from typing import Any, ClassVar, List, Optional, Tuple

from hydra.core.config_store import ConfigStore

from hydraloop.schemas.hook import HookConf, store_hooks


@dataclass
class CheckpointHookConf(HookConf):
    """Writes checkpoints: at an interval, at the end of training, and for the best validation."""

    _target_: str = "hydraloop.hooks.CheckpointHook"
    interval: Optional[int] = 1
    """Epochs (or iterations) between two regular checkpoints, at least 1. 1, as in MMEngine. Null: only the last and
    the best."""
    by_epoch: bool = True
    """Whether `interval` and `save_begin` count epochs, as in MMEngine, or iterations."""
    max_keep_ckpts: Optional[int] = None
    """Number of regular checkpoints to keep, the newest, at least 1; the best ones are not counted. Null: all, so that
    nothing is deleted unless you ask for it."""
    save_best: Any = None
    """Metrics whose best checkpoint is kept: `auto` or true (the task's first metric), a name, or a list of names, each
    with its own file. NaN and infinity are never the best. Null, MMEngine's default, or false: none."""
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
    """Entries to keep in `<name>_published.pth` ([meta,state_dict]), written after training for the last checkpoint
    (with `save_last`) and each best one; the weights are also written as `.safetensors`. `state_dict` is then the
    averaged weights if there are any, unless `weights=raw`. Both files are deleted with `<name>.pth` and cannot be
    resumed from. Null: none; only a run to be published needs them."""
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
    """Whether to average buffers too (statistics of normalisation layers). Integer and boolean buffers, and those of
    parametrizations and pruning, are copied. False, as in MMEngine: the average uses the raw model's buffers. With
    several ranks rank 0's average is used, or with `sync_norm` or `sync_buffers` the mean over the ranks. In both
    cases, the vectors of spectral norm are those of the averaged weights, except with FSDP2."""
    gamma: Optional[float] = None
    """Optimizer steps in which `momentum_annealing` and `exp_momentum` approach `momentum`, above 0; for these two
    only. Null: OpenMMLab's 100 and 2000."""
    warm_up_steps: int = 100
    """`linear_momentum` begins with the share 1 / `warm_up_steps` and grows to `momentum` if that is larger. At least
    1; for this type only. MMDetection's default."""
    weight: Any = None
    """A custom formula, a node with `_target_`: a function of the average, the weights and the number of updates that
    returns the new average, called for each tensor. It replaces `ema_type`, `momentum`, `warmup`, `gamma` and
    `warm_up_steps`. Null: their formulas, which are the usual ones."""


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


def register(store: ConfigStore) -> None:
    """Store the default hooks in the group `default_hooks`, ema and freeze in `hooks`."""
    store_hooks(
        store,
        "default_hooks",
        checkpoint=CheckpointHookConf,
        param_scheduler=ParamSchedulerHookConf,
        grad_clip=GradClipHookConf,
        sampler_seed=DistSamplerSeedHookConf,
    )
    store_hooks(store, ema=EMAHookConf, freeze=FreezeHookConf)
