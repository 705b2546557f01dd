"""Builds the engine of a run from its config. `assemble` creates each part after those that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from hydraloop.data.loaders_from_config import build_loaders
from hydraloop.engine.checkpoint.data_position import move_position
from hydraloop.engine.checkpoint.format import Position, peek
from hydraloop.engine.checkpoint.initial_weights import Rules, initialise
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.hook_order import Slot, missing, slot_of
from hydraloop.engine.precision import make_precision
from hydraloop.engine.run_parts import Settings
from hydraloop.engine.seeding import seed_everything, use_deterministic_kernels, use_threads
from hydraloop.files import run_directory
from hydraloop.files.config_yaml import masked_yaml
from hydraloop.files.lock import RunLock
from hydraloop.files.metrics_log import FILENAME
from hydraloop.files.metrics_writer import cut_after
from hydraloop.files.run_directory import RECORDS
from hydraloop.files.secrets import mask_text
from hydraloop.hooks.build_from_config import build_hooks
from hydraloop.hooks.epoch_start import DistSamplerSeedHook
from hydraloop.hooks.param_scheduler import ParamSchedulerHook
from hydraloop.launch.given_objects import NONE, Parts
from hydraloop.launch.plan import RunPlan
from hydraloop.optim.avoid_dynamo import avoid_dynamo_import
from hydraloop.optim.optimizers import build_optimizer, optimizer_overrides
from hydraloop.optim.schedules_from_config import build_schedules
from hydraloop.schemas.optimizer import nodes
from hydraloop.schemas.selected_hooks import log_notices
from hydraloop.schemas.sweep import OBJECTIVES_OF_JOB
from hydraloop.tasks.building import build_task, prepare_model


def build(plan: RunPlan, distributed: Distributed, *, parts: Parts = NONE, lock: RunLock | None = None) -> Engine:
    """Build an engine, ready to train, and record the run in its directory. Called on each rank.

    Args:
        plan: of the run. Its config is not changed.
        distributed: the ranks.
        parts: finished objects, used instead of those that the config describes.
        lock: of the run directory; the engine holds it while it trains. None: the caller holds it.

    Raises:
        UserError: an option cannot be built; names the key and the fix.
        Exception: any error of a user's own constructor.
    """
    # A run that was started with finished objects can only continue with such objects.
    position = None if plan.checkpoint is None else peek(plan.checkpoint, key="resume")
    if position is not None:
        parts.check(position.given, f"hydraloop.build(hydraloop.compose([…, 'resume={plan.checkpoint}'])")

    engine = assemble(
        plan.cfg,
        distributed,
        run_dir=plan.run_dir,
        parts=parts,
        typed=plan.typed,
        checkpoint=plan.checkpoint,
        position=position,
        lock=lock,
    )

    if distributed.is_main:
        log_notices(plan.cfg, given=parts.hooks)
        if plan.checkpoint is None:
            # An attempt that was killed before its first checkpoint has left records. This run writes them again.
            cut_after(plan.run_dir / FILENAME, iteration=-1, last_validation=-1)
        if not plan.is_recorded:
            run_directory.record_config(plan.cfg, plan.attempt or plan.run_dir / RECORDS)
    return engine


def assemble(
    cfg: DictConfig,
    distributed: Distributed,
    *,
    run_dir: Path,
    parts: Parts,
    typed: Sequence[str] = (),
    checkpoint: Path | None = None,
    position: Position | None = None,
    trains: bool = True,
    lock: RunLock | None = None,
) -> Engine:
    """Return an engine with all its parts. No file is written.

    Args:
        cfg: the validated config.
        distributed: the ranks.
        run_dir: for the run's files.
        parts: finished objects, used instead of those that the config describes.
        typed: the keys whose values replace those of the checkpoint.
        checkpoint: the file from which the run continues. None: a new run.
        position: of the checkpoint in the training data.
        trains: whether the engine gets an optimizer and schedules.
        lock: of the run directory; the engine holds it while it trains.
    """
    # The process. First the choice of kernels: cuBLAS reads it at the first matrix product.
    use_deterministic_kernels(cfg.engine.deterministic)
    device = distributed.device(cfg.engine.device)
    seed_everything(cfg.seed)
    use_threads(cfg.engine.threads)
    avoid_dynamo_import()
    precision = make_precision(cast("Mapping[str, Any]", OmegaConf.to_container(cfg.precision, resolve=True)), device)

    # The data and the task. A resumed run gets all its weights from its checkpoint, so `init` is for new runs only.
    loaders = build_loaders(cfg, device, distributed, parts.all_loaders if trains else parts.loaders)
    task = build_task(cfg, parts.task)
    if cfg.init.checkpoint is not None and checkpoint is None:
        rules: Any = OmegaConf.to_container(cfg.init, resolve=True)
        initialise(task.model, Path(rules.pop("checkpoint")), Rules(**rules), distributed)

    # The optimizer gets the parameters after `prepare_model` has moved them to the device and sharded them.
    channels_last = prepare_model(cfg, task, device, distributed)
    optimizer = build_optimizer(cfg, task.model, task, parts.optimizer) if trains else None
    settings = _settings(cfg, checkpoint, parts, typed, channels_last=channels_last)

    # A resumed run may have another batch size. Schedules need the position in batches of the new size.
    if position is not None and loaders.train is not None:
        epoch_length = settings.limited("train", len(loaders.train))
        move_position(position.progress, position.meta, loaders.train, distributed, epoch_length)

    hooks, slots, on_error = build_hooks(cfg, several=distributed.world_size > 1, given=parts.hooks)
    schedules = {} if optimizer is None else build_schedules(cfg, optimizer, settings, loaders, position)
    if optimizer is not None and loaders.train is not None:
        _add_missing(hooks, slots, scheduled=bool(schedules))

    return Engine(
        task=task,
        optimizer=optimizer,
        loaders=loaders,
        hooks=hooks,
        slots=slots,
        on_error=on_error,
        schedules=schedules,
        settings=settings,
        run_dir=run_dir,
        seed=cfg.seed,
        distributed=distributed,
        precision=precision,
        lock=lock,
    )


def _settings(
    cfg: DictConfig, checkpoint: Path | None, parts: Parts, typed: Sequence[str], *, channels_last: bool
) -> Settings:
    """Return the options of the engine: those of the group `engine`, and those of other groups that the engine needs.

    Args:
        cfg: the validated config.
        checkpoint: the file from which the run continues. None: a new run.
        parts: finished objects, which the checkpoints name.
        typed: the keys whose values replace those of the checkpoint.
        channels_last: whether images are stored channels last on the device.
    """
    engine: Any = OmegaConf.to_container(cfg.engine, resolve=True)
    optimizers = nodes(cfg.optimizer)
    objectives: Any = OmegaConf.to_container(cfg.sweep.objectives)
    return Settings(
        **{**engine, "channels_last": channels_last},
        resume=checkpoint,
        resume_strict=cfg.resume_strict,
        optimizer_overrides=optimizer_overrides(cfg, typed) if checkpoint is not None else frozenset(),
        every={name: node.get("every", 1) for name, node in optimizers.items()},
        closures={name: node.get("closure") for name, node in optimizers.items()},
        load_from=None if cfg.load_from is None else Path(cfg.load_from),
        weights=cfg.weights,
        objectives={name: how == "max" for name, how in objectives.items() if name not in OBJECTIVES_OF_JOB},
        metadata={
            "experiment_name": mask_text(cfg.experiment_name),
            "config": masked_yaml(cfg, resolve=True),
            **parts.meta,
        },
    )


def _add_missing(hooks: dict[str, Hook | None], slots: list[Slot], *, scheduled: bool) -> None:
    """Add the default hooks that a run must have (`missing`), unless a hook of their class has another name.

    Args:
        hooks: by name; None for a hook that the config sets to null. The missing ones are added.
        slots: the places of the hooks in the order. Those of the missing hooks are added.
        scheduled: whether the run has schedules.
    """
    classes: dict[str, type[Hook]] = {"sampler_seed": DistSamplerSeedHook, "param_scheduler": ParamSchedulerHook}
    for name in missing(hooks, scheduled=scheduled):
        if not any(isinstance(hook, classes[name]) for hook in hooks.values()):
            hook = hooks[name] = classes[name]()
            hook.key = f"default_hooks.{name}"
            slots.append(slot_of(name, hook, is_default=True))
