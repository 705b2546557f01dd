"""The directory of a run or sweep: determined once, locked, and known to be writable and not another run's."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, read_write

from hydraloop.cli.command import Command
from hydraloop.cli.hydra_run import quoted
from hydraloop.errors import UserError
from hydraloop.run import atomic, attempts
from hydraloop.run import directory as run_directory
from hydraloop.run.lock import RunLock
from hydraloop.run.resume import Resumed
from hydraloop.run.resume import find as find_resumed
from hydraloop.validate import hydra_config

_KEY = "hydra.run.dir"
_SWEEP_KEY = "hydra.sweep.dir"
_JOB_KEY = "hydra.sweep.subdir"
_OWNER = ".job"
"""File in the run directory of a job: its number. Not in a directory that only one job can have."""
_ENDING = 30.0
"""Seconds that a job waits for the ranks of its earlier attempt to end, after their launcher was killed."""


def settle_run(command: Command, restarted: Callable[[], Resumed] | None, locks: ExitStack) -> Path | None:
    """Determine the directory of a run and write it into the config. Returns the checkpoint to resume from, if any.

    Args:
        command: of a single run. `hydra.run.dir` of its config is set, and `hydra.output_subdir` for a resumed run.
        restarted: finds both for a run that torchrun has restarted. None: this is the first start.
        locks: gets the lock of the directory.

    Raises:
        UserError: the directory cannot be written, is locked, holds a run or has links to other places, or there is
            nothing to resume.
    """
    cfg = command.cfg
    with hydra_config(cfg):
        directory = Path(cfg.hydra.run.dir)
    named = directory if _KEY in command.typed or (cfg.resume == "auto" and is_constant(cfg.hydra.run)) else None

    def find(named: Path | None) -> Resumed:
        if restarted is not None:
            return restarted()
        return Resumed(None, None) if cfg.resume is None else find_resumed(cfg, named)

    found = find(named)
    key = _KEY if cfg.resume is None else "resume"
    if found.run_dir is not None and not command.follows_links:
        run_directory.check_links(found.run_dir, key=key)
    locks.enter_context(
        RunLock(found.run_dir or directory, key=key, wait=cfg.resume == "auto" or restarted is not None)
    )
    found = find(found.run_dir or named)  # again: another process may have trained there until it was locked
    if restarted is not None:
        print(f"restarted in {found.run_dir}, from {found.checkpoint or 'the beginning'}")
    if found.run_dir is not None:
        directory = found.run_dir
    elif cfg.resume == "auto":
        print(f"{directory} has no checkpoint: a new run starts there", file=sys.stderr)
    else:
        run_directory.refuse_held(directory, key=_KEY)
    with read_write(cfg.hydra):
        cfg.hydra.run.dir = str(directory)
        if found.run_dir is not None:
            cfg.hydra.output_subdir = str(attempts.following(directory).relative_to(directory))
    return found.checkpoint


def settle_sweep(command: Command, locks: ExitStack) -> tuple[Path, list[str]]:
    """Return the directory of a sweep, locked until `locks` closes, and the overrides with which Hydra uses it.

    Raises:
        UserError: the directory cannot be written, is locked, or holds a run or a sweep.
    """
    cfg = command.cfg
    with hydra_config(cfg):
        directory = Path(cfg.hydra.sweep.dir)
    locks.enter_context(RunLock(directory, key=_SWEEP_KEY))
    if run_directory.holds_run(directory) or any(
        (directory / name).exists() for name in ("multirun.yaml", "sweep.json")
    ):
        raise UserError(f"{directory} holds a run already", key=_SWEEP_KEY, remedy="Name another directory.")
    others = [line for line in command.overrides if line.lstrip("+").partition("=")[0] != _SWEEP_KEY]
    return directory, [*others, f"{_SWEEP_KEY}={quoted(directory)}"]


def settle_job(
    run_dir: Path, sweep: Path, number: int, locks: ExitStack, *, held: Path, continues: bool = False
) -> None:
    """Check the run directory of a sweep's job, and lock it until `locks` closes.

    Args:
        sweep: the directory of the sweep.
        number: of the job.
        held: a directory that the job has locked already.
        continues: whether the job was started before.

    Raises:
        UserError: it is outside the sweep's directory, another job's, locked, or holds a run.
    """

    def refused(problem: str) -> UserError:
        return UserError(f"{run_dir} {problem}", key=_JOB_KEY, remedy="Let it tell the jobs apart: ${hydra.job.num}.")

    resolved, owner = run_dir.resolve(), run_dir / _OWNER
    if not resolved.is_relative_to(sweep.resolve()):
        raise refused(f"is outside the sweep's directory, {sweep}")
    is_named = resolved != held.resolve()
    if is_named:
        locks.enter_context(RunLock(run_dir, key=_JOB_KEY, patience=_ENDING if continues else 0.0))
        continues = continues and owner.exists()
        if owner.exists() and owner.read_text(encoding="ascii") != str(number):
            raise refused("is another job's already")
    if run_directory.has_trained(run_dir) and not continues:  # Hydra may have written this job's records
        raise refused("holds a run already")
    if is_named and not continues:
        atomic.write_text(owner, str(number))


def is_constant(node: DictConfig) -> bool:
    """Return whether `hydra.run` or `hydra.sweep` names one directory, not a new one for each start."""
    written: Any = OmegaConf.to_container(node, resolve=False)
    return not any(new in str(written["dir"]) for new in ("${now:", "${run_id:"))
