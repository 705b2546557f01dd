"""Options of the hooks that take part in training: checkpoint, ema, param_scheduler, grad_clip, sampler_seed."""

from dataclasses import dataclass
from typing import Any, ClassVar, List, Optional, Tuple, Union

from hydra.core.config_store import ConfigStore


@dataclass
class CheckpointHookConf:
    """Files of the run: at an interval, at the end, and of the best validation."""

    default_priority: ClassVar[int] = 90
    mount_points: ClassVar[Tuple[str, ...]] = (
        "before_run",
        "after_load_checkpoint",
        "before_train",
        "before_train_epoch",
        "after_train_iter",
        "after_train_epoch",
        "after_val_epoch",
        "after_train",
    )
    runs_after: ClassVar[Tuple[str, ...]] = ("param_scheduler", "ema", "sync_buffers")

    _target_: str = "hydraloop.hooks.CheckpointHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: VERY_LOW, MMEngine's, since it saves what others have done."""
    on_error: Optional[str] = "raise"
    """`raise`, `warn` or `disable`; a run that cannot save is worth stopping at once."""
    interval: Optional[int] = 1
    """Epochs (or iterations) between two checkpoints; 1 is MMEngine's. Null: none but the last and the best."""
    by_epoch: bool = True
    """Whether `interval` and `save_begin` count epochs, as in MMEngine; false: iterations."""
    max_keep_ckpts: Optional[int] = None
    """How many of them to keep, the newest; the best ones are not counted. Null: all, nothing is deleted unasked."""
    save_best: Any = None
    """`auto` or true (the task's first metric), a name, a list: a file for the best of each. Null, MMEngine's default:
    none."""
    rule: Any = None
    """`greater` or `less` values are better; a list: of each name in `save_best`. Null: derived from the lists below
    and from what the metric declares."""
    greater_keys: Optional[List[str]] = None
    """Names, or parts of them, of metrics whose high values are good. Null: MMEngine's (acc, top, auc, mAP, …)."""
    less_keys: Optional[List[str]] = None
    """Names, or parts of them, of metrics whose low values are good. Null: MMEngine's (loss)."""
    out_dir: Optional[str] = None
    """A folder for the files, anywhere (`~` too). Null: `checkpoints` in the run's, which stays in one piece so."""
    published_keys: Optional[List[str]] = None
    """Entries to keep in `<name>_published.pth`, written after training ([meta,state_dict]), and the weights as
    `.safetensors` beside it; both are deleted with `<name>.pth`, and cannot be resumed from. Null: none is written,
    since only a run that is to be handed out needs them."""
    save_last: bool = True
    """Whether the end of training is saved whatever the interval; true, since its weights are what a run is for."""
    save_begin: int = 0
    """The first epoch (or iteration) that may be due; 0: from the start."""
    save_optimizer: bool = True
    """Whether the optimizer's state is in it; true: only such a file can be resumed from."""
    save_param_scheduler: bool = True
    """Whether the schedules' state is in it; true: only such a file can be resumed from."""


@dataclass
class EMAHookConf:
    """An average of the weights for validation and test; training does not notice."""

    default_priority: ClassVar[int] = 50
    mount_points: ClassVar[Tuple[str, ...]] = (
        "before_run",
        "before_train",
        "before_train_epoch",
        "after_train_iter",
        "after_train_epoch",
        "before_save_checkpoint",
        "before_val_epoch",
        "before_test_epoch",
    )
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.EMAHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: NORMAL, MMEngine's: before the checkpoint that saves its average."""
    on_error: Optional[str] = "raise"
    """`raise`, `warn` or `disable`; an average with a gap in it is not the one that was asked for."""
    ema_type: str = "exponential"
    """`exponential` (MMEngine's), `stochastic` (a mean), `momentum_annealing`, `exp_momentum`, `linear_momentum`."""
    momentum: float = 0.0002
    """Share of the new weights in each update, in (0, 1); MMEngine's. It averages over some 1 / 0.0002 = 5000 steps."""
    warmup: bool = True
    """Whether `exponential` begins with the share 9 / (10 + updates): else a short run averages its initial weights."""
    interval: int = 1
    """Optimizer steps (epochs with `by_epoch`) between two updates; 1 is MMEngine's and costs one small kernel."""
    by_epoch: bool = False
    """Whether to update at the end of epochs; false, as in MMEngine: after optimizer steps."""
    begin_epoch: int = 0
    """The epoch (from 1) whose first step (with `by_epoch`, whose end) has the first update; the interval counts from
    there. 0: no begin. Alternative to `begin_iter`."""
    begin_iter: int = 0
    """The optimizer step (from 1) that has the first update; the interval counts from there. 0: no begin."""
    update_buffers: bool = False
    """Whether buffers (of normalisation layers) are averaged too; false, as in MMEngine: the raw model's are used."""
    gamma: Optional[float] = None
    """Optimizer steps until `momentum_annealing`, `exp_momentum` come near `momentum`; null: OpenMMLab's 100, 2000."""
    warm_up: int = 100
    """Optimizer steps of `linear_momentum`'s beginning; MMDetection's."""


@dataclass
class ParamSchedulerHookConf:
    """Steps the schedules of the run."""

    default_priority: ClassVar[int] = 70
    mount_points: ClassVar[Tuple[str, ...]] = (
        "before_run",
        "before_train",
        "after_train_iter",
        "on_log",
        "after_train_epoch",
        "after_val_epoch",
        "after_train",
    )
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.ParamSchedulerHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: LOW, MMEngine's: behind the record of the lr that was used."""
    on_error: Optional[str] = "raise"
    """`raise`, `warn` or `disable`; training on with the wrong lr would be another run."""


@dataclass
class GradClipHookConf:
    """Bounds the gradients before each optimizer step; off while `max_norm` and `clip_value` are null."""

    default_priority: ClassVar[int] = 40
    mount_points: ClassVar[Tuple[str, ...]] = ("before_train_epoch", "before_optimizer_step", "after_train_iter")
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.GradClipHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: ABOVE_NORMAL: others then see the gradients that the step uses."""
    on_error: Optional[str] = "raise"
    """`raise`, `warn` or `disable`; a step with unbounded gradients can undo a whole training."""
    max_norm: Optional[float] = None
    """Largest norm of all gradients together, above 0. Null: off, as in MMEngine; 1.0 is usual for transformers."""
    norm_type: float = 2.0
    """Which norm, above 0 (`inf` too); 2 is torch's default."""
    clip_value: Optional[float] = None
    """Largest size of each single entry, above 0. Null: off. Not together with `max_norm`."""
    error_if_nonfinite: bool = False
    """Whether a NaN or infinite norm ends the run; false, since looking at it costs a host sync in every step."""


@dataclass
class DistSamplerSeedHookConf:
    """A new shuffle each epoch, by (seed, epoch)."""

    default_priority: ClassVar[int] = 50
    mount_points: ClassVar[Tuple[str, ...]] = ("before_train_epoch",)
    runs_after: ClassVar[Tuple[str, ...]] = ()

    _target_: str = "hydraloop.hooks.DistSamplerSeedHook"
    priority: Optional[Union[int, str]] = None
    """When it is called, 0..100 or a name; null: NORMAL, MMEngine's."""
    on_error: Optional[str] = "raise"
    """`raise`, `warn` or `disable`; the same order in every epoch would go unnoticed."""


def register(store: ConfigStore) -> None:
    """Store the default hooks of this file in the group `default_hooks`, the others in `hooks`."""
    for name, node in (
        ("checkpoint", CheckpointHookConf),
        ("param_scheduler", ParamSchedulerHookConf),
        ("grad_clip", GradClipHookConf),
        ("sampler_seed", DistSamplerSeedHookConf),
    ):
        store.store(group="default_hooks", name=name, package=f"default_hooks.{name}", node=node)
    store.store(group="hooks", name="ema", package="hooks.ema", node=EMAHookConf)
