"""Saves a run to a checkpoint and restores it: which state, in which order."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop.engine.checkpoint import optimizers, position, shards
from hydraloop.engine.checkpoint.format import FORMAT, Checkpoint, check_resumable, write
from hydraloop.engine.checkpoint.format import load as load_file
from hydraloop.engine.checkpoint.strict import load_named
from hydraloop.engine.checkpoint.weights import load_own_state, load_weights, own_state
from hydraloop.engine.checks import check_since_record
from hydraloop.engine.device import seeding
from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from hydraloop.run.changes import resumed
from hydraloop.run.checkpoint_files import point_to, remove, remove_old_shards, still_safe
from hydraloop.run.environment import versions

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)


def collect(engine: Engine, *, optimizer: bool = True, schedulers: bool = True) -> Checkpoint:
    """Return the state of the run as a checkpoint (see `format.py`); its tensors are the run's, not copies.

    Called on every rank. Sharded tensors are DTensors; `stand_alone` separates them.

    Raises:
        UserError: the loss since the last record is not finite.
    """
    checkpoint: Checkpoint = {
        "format": FORMAT,
        "meta": {
            **engine.settings.metadata,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": versions(),
            "git": engine.git,
            "seed": engine.seed,
            "metric_names": list(engine.metric_names),
            "metrics": dict(engine.metrics),
            "epoch": engine.progress.epoch,
            "iteration": engine.progress.iteration,
            "epoch_length": engine.epoch_length,
            **position.sizes(engine),
            "order": position.order(engine),
            "left_out_steps": _left_out_steps(engine),
            "ranks": engine.distributed.world_size,
            "ranks_per_node": engine.distributed.local_world_size,
        },
        "state_dict": engine.model.state_dict(),
        "hooks": _of_all_ranks(engine, _hook_states(engine)),
        "precision": engine.precision.state_dict(),
        "rng": seeding.of_all_ranks(engine.distributed.gather(seeding.rng_state())),
        "progress": engine.progress.state_dict(),
    }
    of_ranks = engine.distributed.gather(
        {"data": position.of(engine), "messages": engine.messages.state_dict() or None}
    )
    losses = [(of_rank["messages"] or {}).get("loss", [0.0]) for of_rank in of_ranks]
    check_since_record(engine, [sum(loss[:2]) for loss in losses])
    for entry in ("data", "messages"):
        states = [of_rank[entry] for of_rank in of_ranks]
        if any(state is not None for state in states):
            checkpoint[entry] = states
    task = own_state(engine.task)
    if task:
        checkpoint["task"] = task
    if optimizer:
        checkpoint["optimizer"] = engine.optimizer.state_dict()
        checkpoint["meta"] |= optimizers.meta_of(engine)
    if schedulers:
        checkpoint["schedulers"] = {name: schedule.state_dict() for name, schedule in engine.schedulers.items()}
    return checkpoint


def _left_out_steps(engine: Engine) -> int:
    """Return the number of accumulation windows by which left out batches have made the run shorter until now."""
    if engine.settings.max_iters is not None:
        return 0
    here = (engine.progress.epoch, engine.progress.batch_in_epoch)
    left_out = ((epoch, index) for epoch, found in engine.left_out.items() for index in found)
    return len({(epoch, index // engine.accumulate) for epoch, index in left_out if (epoch, index) < here})


def stand_alone(checkpoint: Checkpoint, distributed: Distributed) -> Checkpoint:
    """Return what this rank writes, in plain tensors; called on every rank. With FSDP2, `shards` has its parts."""
    if not distributed.sharded:
        return checkpoint
    parts: shards.Parts = {}
    rest = shards.split(checkpoint, parts)
    return {**(rest if distributed.is_main else {}), "shards": parts}


def _hook_states(engine: Engine) -> dict[str, Any]:
    """Return each hook's state. A hook that fails and may (`on_error`) has none."""
    states = {
        name: engine.stages.run_for(name, "state_dict", hook.state_dict)
        for name, hook in engine.hooks.items()
        if has_state(hook) and (engine.distributed.is_main or not hook.rank_zero_only)
    }
    return {name: state for name, state in states.items() if state is not None}


def _of_all_ranks(engine: Engine, states: dict[str, Any]) -> dict[str, Any]:
    """Leave out states that another rank does not have: gathering their sharded tensors would wait for that rank."""
    gathered: list[list[str]] = engine.distributed.gather(list(states))
    alone = {name for name, hook in engine.hooks.items() if hook.rank_zero_only}
    return {name: state for name, state in states.items() if name in alone or all(name in names for names in gathered)}


def write_file(
    path: Path, checkpoint: Checkpoint, distributed: Distributed, *, last: bool, delete: Sequence[Path]
) -> bool:
    """Write a file, maybe in a thread; then delete others. Called on rank 0; with FSDP2, on every rank.

    Args:
        checkpoint: as `stand_alone` returns it.
        last: whether `resume=auto` and restarts continue from it.
        delete: files that are not needed once it is written.

    Returns:
        Whether it was written. If the disk is full or the folder is read-only, a warning says what is still safe.
    """
    try:
        if distributed.mesh is not None:
            entry = shards.write(path, checkpoint["shards"], distributed.mesh)
            if not distributed.is_main:
                return True
            checkpoint = {**checkpoint, "shards": entry}
        write(path, checkpoint)
        if last:
            point_to(path)
    except OSError as full:
        log.warning(
            "%s could not be written: %s; %s. Training continues, and the next save is tried.",
            path, full.strerror or full, still_safe(path.parent),
        )  # fmt: skip
        return False
    remove_old_shards(path)
    for file in delete:
        remove(file)
    return True


def has_state(hook: Hook) -> bool:
    """Return whether the hook saves anything: its class overrides `state_dict`."""
    return type(hook).state_dict is not Hook.state_dict


def load(engine: Engine) -> dict[str, Any] | None:
    """Load the checkpoint of `resume`, once for each engine. Then, also after `load_from`, call after_load_checkpoint.

    Returns:
        The saved states of the random generators; None if nothing is resumed.

    Raises:
        UserError: the file does not fit the run; names the entry.
    """
    settings = engine.settings
    if engine.loaded:
        return None
    engine.loaded = True
    rng: dict[str, Any] | None = None
    if settings.resume is not None:
        rng = restore(engine, settings.resume)
        done = engine.progress.iteration
        log.info("resumed from %s, iteration %d", settings.resume, done)
        if done >= engine.max_iters:
            option = "max_epochs" if settings.max_iters is None else "max_iters"
            log.info("all %d iterations are done; to train longer, set engine.%s higher", done, option)
    elif engine.loaded_from is not None:
        checkpoint, engine.loaded_from = engine.loaded_from, None
        for call in engine.stages.after_load_checkpoint:
            call(engine, checkpoint)
    return rng


def restore(engine: Engine, path: Path) -> dict[str, Any] | None:
    """Restore the state of the run in a checkpoint, then call after_load_checkpoint.

    Returns:
        The saved states of this rank's random generators, which are not restored; None if that run had fewer ranks.

    Raises:
        UserError: the file does not fit the run; names the entry.
    """
    checkpoint = load_file(path, key="resume", mmap=True, ranks=engine.distributed)
    check_resumable(checkpoint, path)
    if engine.distributed.is_main and engine.resumed_from is None:  # not after a rollback
        now = {**engine.settings.metadata, "versions": versions(), "git": engine.git}
        for line in resumed(checkpoint["meta"], now):
            log.info("%s", line)
    _resume(engine, checkpoint)
    engine.resumed_from = path
    for call in engine.stages.after_load_checkpoint:
        call(engine, checkpoint)
    return deepcopy(seeding.of_rank(checkpoint["rng"], engine.distributed.rank))  # the file is mapped to memory


def _resume(engine: Engine, checkpoint: Checkpoint) -> None:
    load_weights(engine, checkpoint["state_dict"], "resume")
    strict = engine.settings.resume_strict
    load_own_state(engine, checkpoint)
    for entry in ("optimizer", "schedulers"):
        if entry not in checkpoint and strict:
            raise UserError(
                f"the checkpoint has no {entry}: it was saved without it",
                key="resume",
                remedy="To continue with a new one, set resume_strict=false.",
            )
    if "optimizer" in checkpoint:
        optimizers.load(engine, checkpoint, strict)
    load_named("schedulers", engine.schedulers, checkpoint.get("schedulers", {}), strict)
    hooks = {name: hook for name, hook in engine.hooks.items() if has_state(hook)}
    load_named("hooks", hooks, checkpoint["hooks"], strict)
    engine.precision.load_state_dict(checkpoint["precision"])
    engine.progress.load_state_dict(checkpoint["progress"])
    engine.began_at = engine.saved_iteration = engine.progress.iteration
    engine.metrics = dict(checkpoint["meta"].get("metrics", {}))
    position.check(engine, checkpoint["meta"])
    position.load(engine, checkpoint["meta"], checkpoint.get("data"), strict)
    engine.messages.load_state_dict(checkpoint.get("messages", []), engine.distributed)
    engine.max_iters, engine.max_epochs = engine.settings.training_length(engine.epoch_length, engine.progress)
