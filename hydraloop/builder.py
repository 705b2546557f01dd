"""From a config to an `Engine`: `build` makes the parts in the order in which they need each other.

Each part is instantiated through the allowlist (`hydraloop/safety/`). Errors name the key in the config.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from hydraloop.data.loaders_from_config import build_loaders
from hydraloop.data.random_state import mix_seed
from hydraloop.engine.checkpoint.format import Position, peek
from hydraloop.engine.checkpoint.initial_weights import Rules, initialise
from hydraloop.engine.device.precision import make_precision
from hydraloop.engine.device.seeding import rng_state, seed_everything, use_deterministic_kernels, use_threads
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.distributed.process_group import connect
from hydraloop.engine.engine import Engine
from hydraloop.hooks.checkpoint.hook import CheckpointHook
from hydraloop.hooks.shared.build_from_config import build_hooks
from hydraloop.hooks.shared.selected_hooks import log_notices
from hydraloop.optim.avoid_dynamo import avoid_dynamo_import
from hydraloop.optim.optimizers import build_optimizer
from hydraloop.optim.schedules_from_config import build_schedules
from hydraloop.parts import NONE, Parts
from hydraloop.run import directory as run_directory
from hydraloop.run.config_yaml import remember_config
from hydraloop.run.lock import RunLock
from hydraloop.run.record_cuts import cut_after
from hydraloop.run.record_log import FILENAME
from hydraloop.run.resume import Resumed, lock_of, settle_on_main
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.settings_from_config import settings_from_config
from hydraloop.tasks.building import build_task, prepare_model
from hydraloop.tracking.cursor import wait_for_followers
from hydraloop.validate import check_strategy, check_trace_paths, validate


def build(
    cfg: DictConfig,
    *,
    run_dir: Path | None = None,
    resumed: Resumed | None = None,
    distributed: Distributed | None = None,
    parts: Parts = NONE,
) -> Engine:
    """Build an engine, ready to train, from a config, and record the run in its directory.

    If a launcher (torchrun) has started several processes, each of them calls `build`, and they train together.

    Args:
        cfg: as composed. It is not changed.
        run_dir: the directory for the run's files. None: a new one under `outputs/`, or that of the resumed run.
        resumed: directory and checkpoint, if the caller has determined and recorded them. None: `build` does it.
        distributed: the ranks. None: as the launcher's environment variables say.
        parts: finished objects, used instead of those that the config describes.

    Raises:
        UserError: an option that cannot be built; names the key and the fix.
        Exception: any error of a user's own constructor.
    """
    if resumed is None:
        remember_config(cfg)
    validate(cfg)
    distributed = distributed or connect(cfg.distributed, cfg.engine.device)
    check_strategy(cfg.distributed.strategy, several=distributed.world_size > 1)
    from_main = distributed.from_main
    settled = resumed or settle_on_main(cfg, run_dir, is_main=distributed.is_main, from_main=from_main)
    directory = settled.run_dir or run_directory.new()
    check_trace_paths(cfg, directory)
    position = None if settled.checkpoint is None else peek(settled.checkpoint, key="resume")
    if position is not None:
        parts.check(position.given, f"hydraloop.build(hydraloop.compose([…, 'resume={settled.checkpoint}'])")
    with ALLOWLIST.trusting_for(cfg):
        lock = lock_of(cfg, directory) if distributed.is_main and resumed is None else None
        engine = assemble(
            cfg, distributed, directory, parts, checkpoint=settled.checkpoint, position=position, lock=lock
        )
    if distributed.is_main:
        log_notices(cfg, given=parts.hooks)
        if settled.checkpoint is None and (resumed is not None or cfg.resume == "auto"):
            wait_for_followers(directory)  # the directory may be that of an attempt that was killed
            cut_after(directory / FILENAME, iteration=-1, last_validation=-1)
        folders = [hook.out_dir for hook in engine.hooks.values() if isinstance(hook, CheckpointHook) and hook.out_dir]
        is_resumed, is_recorded = settled.checkpoint is not None, resumed is not None
        run_directory.record(cfg, engine.run_dir, folders, resumed=is_resumed, recorded=is_recorded)
    return engine


def assemble(
    cfg: DictConfig,
    distributed: Distributed,
    run_dir: Path,
    parts: Parts,
    *,
    checkpoint: Path | None = None,
    position: Position | None = None,
    trains: bool = True,
    lock: RunLock | None = None,
) -> Engine:
    """Make the parts of an engine, in the order in which they need each other. No file is written.

    Args:
        cfg: validated.
        checkpoint: where the run continues.
        position: that of the checkpoint.
        trains: whether the engine gets an optimizer and schedules.
        lock: of the run directory.
    """
    use_deterministic_kernels(cfg.engine.deterministic)
    device = distributed.device(cfg.engine.device)
    seed_everything(cfg.seed)
    use_threads(cfg.engine.threads)
    avoid_dynamo_import()
    precision = make_precision(cast("Mapping[str, Any]", OmegaConf.to_container(cfg.precision, resolve=True)), device)
    of_run = None if position is None else position.meta
    loaders = build_loaders(cfg, device, distributed, parts.all_loaders if trains else parts.loaders, of_run=of_run)
    task = build_task(cfg, parts.task)
    if cfg.init.checkpoint is not None and checkpoint is None:
        rules: Any = OmegaConf.to_container(cfg.init, resolve=True)
        initialise(task.model, Path(rules.pop("checkpoint")), Rules(**rules))
    channels_last = prepare_model(cfg, task, device, distributed)
    optimizer = build_optimizer(cfg, task.model, task, parts.optimizer) if trains else None
    settings = settings_from_config(cfg, checkpoint, parts, channels_last=channels_last)
    hooks, slots, on_error = build_hooks(cfg, several=distributed.world_size > 1, given=parts.hooks)
    schedules = {} if optimizer is None else build_schedules(cfg, optimizer, settings, loaders, position)
    if not distributed.is_main:
        seed_everything(mix_seed(cfg.seed, distributed.rank))  # the same model on all ranks, but not the same dropout
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
        generators=rng_state(),
    )
