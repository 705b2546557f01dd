"""Saves a run to a checkpoint and restores it: which state, in which order."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop.engine.checkpoint import optimizer_state, position
from hydraloop.engine.checkpoint.format import FORMAT, Checkpoint, check_resumable, write
from hydraloop.engine.checkpoint.format import load as load_file
from hydraloop.engine.checkpoint.weights import load_weights
from hydraloop.engine.device import seeding
from hydraloop.engine.distributed.fsdp import full, shard_optimizer_state
from hydraloop.engine.hook import Hook
from hydraloop.errors import PeerError, UserError
from hydraloop.run.checkpoint_files import point_to
from hydraloop.run.environment import versions
from hydraloop.run.result import describe

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)


def collect(engine: Engine, *, optimizer: bool = True, schedulers: bool = True) -> Checkpoint:
    """Return the state of the run as a checkpoint (see `format.py`); its tensors are the run's, not copies.

    Called on every rank. Sharded tensors are gathered one at a time; only rank 0 keeps them.
    """
    checkpoint: Checkpoint = {
        "format": FORMAT,
        "meta": {
            **engine.settings.metadata,
            "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
            "versions": versions(),
            "metric_names": list(engine.metric_names),
            "metrics": dict(engine.metrics),
            "epoch": engine.progress.epoch,
            "iteration": engine.progress.iteration,
            "epoch_length": engine.epoch_length,
            "batch_size": position.global_batch_size(engine),
        },
        "state_dict": engine.model.state_dict(),
        "hooks": _of_all_ranks(engine, _hook_states(engine)),
        "precision": engine.precision.state_dict(),
        "rng": seeding.of_all_ranks(engine.distributed.gather(seeding.rng_state())),
        "progress": engine.progress.state_dict(),
    }
    positions = engine.distributed.gather(position.of(engine))
    if any(state is not None for state in positions):
        checkpoint["data"] = positions
    if optimizer:
        checkpoint["optimizer"] = engine.optimizer.state_dict()
        checkpoint["meta"]["optimizer"] = type(engine.optimizer).__name__
        checkpoint["meta"]["hyperparameters"] = engine.hyperparameters
    if schedulers:
        checkpoint["schedulers"] = {name: schedule.state_dict() for name, schedule in engine.schedulers.items()}
    if engine.distributed.sharded:
        checkpoint = full(checkpoint, keep=engine.distributed.is_main)
    return checkpoint


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


def write_by_main(engine: Engine, path: Path, checkpoint: Checkpoint, *, last: bool) -> None:
    """Let rank 0 write the file. All ranks continue together after it, or all raise.

    Args:
        last: whether `resume=auto` and restarts continue from it.

    Raises:
        OSError: rank 0 could not write it.
        PeerError: the same, on the other ranks.
    """
    error: Exception | None = None
    if engine.distributed.is_main:
        try:
            write(path, checkpoint)
            if last:
                point_to(path)
        except Exception as raised:
            error = raised
    on_main = engine.distributed.from_main(None if error is None else describe(error))
    if error is not None:
        raise error
    if on_main is not None:
        raise PeerError(f"rank 0 could not write {path}: {on_main}")


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
        checkpoint = load_file(settings.resume, key="resume")
        check_resumable(checkpoint, settings.resume)
        _resume(engine, checkpoint)
        rng = seeding.of_rank(checkpoint["rng"], engine.distributed.rank)
        done = engine.progress.iteration
        log.info("resumed from %s, iteration %d", settings.resume, done)
        if done >= engine.max_iters:
            log.warning("the resumed run has already trained for %d iterations; set engine.max_epochs higher", done)
    elif engine.loaded_from is not None:
        checkpoint, engine.loaded_from = engine.loaded_from, None
    else:
        return None
    for call in engine.stages.after_load_checkpoint:
        call(engine, checkpoint)
    return rng


def _resume(engine: Engine, checkpoint: Checkpoint) -> None:
    load_weights(engine, checkpoint["state_dict"], "resume")
    strict = engine.settings.resume_strict
    for entry in ("optimizer", "schedulers"):
        if entry not in checkpoint and strict:
            raise UserError(
                f"the checkpoint has no {entry}: it was saved without it",
                key="resume",
                remedy="To continue with a new one, set resume_strict=false.",
            )
    if "optimizer" in checkpoint:
        saved, kind = checkpoint["meta"].get("optimizer"), type(engine.optimizer).__name__
        if saved not in (None, kind):  # such a state may load without an error, and fail in the first step
            raise UserError(
                f"the checkpoint has the state of {saved}, this run uses {kind}",
                key="optimizer",
                remedy="Use the same optimizer; to change it, start a new run with load_from=…",
            )
        state = checkpoint["optimizer"]
        if engine.distributed.sharded:
            state = shard_optimizer_state(state, engine.optimizer)
        try:
            optimizer_state.load(engine.optimizer, state)
        except ValueError as error:
            raise UserError(f"the optimizer's state does not fit: {error}", key="resume") from error
        _override_hyperparameters(engine, checkpoint["meta"].get("hyperparameters"))
    _load_named("schedulers", engine.schedulers, checkpoint.get("schedulers", {}), strict)
    hooks = {name: hook for name, hook in engine.hooks.items() if has_state(hook)}
    _load_named("hooks", hooks, checkpoint["hooks"], strict)
    engine.precision.load_state_dict(checkpoint["precision"])
    engine.progress.load_state_dict(checkpoint["progress"])
    engine.began_at = engine.progress.iteration
    engine.metrics = dict(checkpoint["meta"].get("metrics", {}))
    position.check(engine, checkpoint["meta"])
    position.load(engine, checkpoint.get("data"), strict)
    engine.max_iters, engine.max_epochs = engine.settings.training_length(engine.epoch_length, engine.progress)


def _override_hyperparameters(engine: Engine, given: list[dict[str, Any]] | None) -> None:
    """Apply the hyperparameters typed on the command line; the others stay as loaded, with a warning if they differ.

    Args:
        given: the hyperparameters in the checkpoint; None: a file of an older version.
    """
    config = engine.hyperparameters
    engine.hyperparameters = given or optimizer_state.hyperparameters(engine.optimizer)
    setting = {name: key for key, schedule in engine.schedulers.items() for name in config[0] if schedule.sets(name)}
    typed = engine.settings.optimizer_overrides
    lines = optimizer_state.override(engine.optimizer, engine.hyperparameters, config, typed - setting.keys())
    kept = optimizer_state.kept(engine.optimizer, engine.hyperparameters, config, setting.keys())
    if engine.distributed.is_main:
        for line in lines:
            log.info("%s", line)
        for name in sorted(typed & setting.keys()):
            log.warning("optimizer.%s has no effect: scheduler.%s sets it to its own numbers", name, setting[name])
        for line in kept:
            log.warning("%s", line)


def _load_named(entry: str, targets: dict[str, Any], states: dict[str, Any], strict: bool) -> None:
    """Load each state into the target of its name; with `strict` the names must be the same."""
    for name in targets.keys() - states.keys():
        _differs(strict, f"{entry}.{name}", "the checkpoint has no state of it", "Leave it out, or set")
    for name in states.keys() - targets.keys():
        problem = "the checkpoint has its state, but this run does not use it"
        _differs(strict, f"{entry}.{name}", problem, "Repeat the options of the resumed run, or set")
    for name, target in targets.items():
        if name in states:
            target.load_state_dict(states[name])


def _differs(strict: bool, key: str, problem: str, remedy: str) -> None:
    if strict:
        raise UserError(problem, key=key, remedy=f"{remedy} resume_strict=false to continue without that state.")
    log.warning("%s: %s; continuing without that state (resume_strict=false)", key, problem)
