"""From a checked config to the plan of a run: its directory, locked, and where it continues. Imports no torch.

Each rank makes a `Draft`, before there are locks. Rank 0 makes a `RunPlan` of it, and all ranks train by it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hydraloop.config.checks import Draft
from hydraloop.files import checkpoint_to_resume, console, run_directory
from hydraloop.files.config_yaml import dumped, remember_config
from hydraloop.files.lock import LEASE, PATIENCE, RunLock
from hydraloop.files.run_directory import RECORDS
from hydraloop.files.secrets import masked

if TYPE_CHECKING:
    from hydraloop.engine.distributed.comm import Distributed


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """A run with its directory, which is locked. All ranks train by it."""

    cfg: DictConfig
    """Validated, without the node `hydra`."""
    run_dir: Path
    checkpoint: Path | None = None
    """Where the run continues; None for a new run, or one that starts again."""
    attempt: Path | None = None
    """The folder for the records of this attempt to resume the run, `.hydra/resume_<n>`; None for a new run."""
    is_recorded: bool = False
    """Whether the config is written by Hydra, or as Hydra does. Otherwise the builder writes it."""
    known: Sequence[str] = ()
    """The `known_checkpoints` at the start. This run has written all other checkpoints of its directory."""
    typed: Sequence[str] = ()
    """Keys whose values replace those of the checkpoint."""


def plan_run(draft: Draft, locks: ExitStack, find: checkpoint_to_resume.Find | None = None) -> RunPlan:
    """Choose the directory of a run of the command line, write it into the node `hydra`, and lock it.

    Interpolations of `${hydra:…}` resolve.

    Args:
        draft: of a single run.
        locks: gets the lock.
        find: of a run that torchrun has restarted. None: this is the first start.

    Raises:
        UserError: the directory cannot be written, is locked, holds a run or has links to other places, or there is
            nothing to resume.
    """
    cfg, key = draft.cfg, "hydra.run.dir"
    directory = Path(cfg.hydra.run.dir)
    is_named = key in draft.typed or (cfg.resume == "auto" and is_constant(cfg.hydra.run))
    plan, _ = _plan(cfg, directory if is_named else None, lambda: directory, locks, key=key, find=find)
    if find is not None:
        print(f"restarted in {plan.run_dir}, from {plan.checkpoint or 'the beginning'}")
    elif cfg.resume == "auto" and plan.checkpoint is None:
        print(f"{directory} has no checkpoint: a new run starts there", file=sys.stderr)
    return of_draft(plan, draft)


def of_draft(plan: RunPlan, draft: Draft) -> RunPlan:
    """Return the plan of a run with its directory in the node `hydra` of the draft, and with a copy of its config."""
    cfg = draft.cfg
    with read_write(cfg.hydra):
        cfg.hydra.run.dir = str(plan.run_dir)
    return without_hydra(replace(plan, cfg=deepcopy(cfg)), draft.typed)


def plan_job(cfg: DictConfig, run_dir: Path, *, typed: Sequence[str], continues: bool) -> RunPlan:
    """Plan the job of a sweep, whose directory is locked.

    Args:
        cfg: its node `hydra` is removed.
        run_dir: the directory of the job.
        typed: keys that the command line of the sweep sets.
        continues: whether the job was started before.

    Raises:
        UserError: all of its checkpoints are damaged.
    """
    checkpoint = checkpoint_to_resume.newest_checkpoint(run_dir) if continues else None
    attempt = None if checkpoint is None else run_directory.following(run_dir)
    known = checkpoint_to_resume.known_checkpoints(run_dir)
    plan = RunPlan(cfg=cfg, run_dir=run_dir, checkpoint=checkpoint, attempt=attempt, known=known)
    return without_hydra(plan, typed)


def plan_build(
    cfg: DictConfig,
    run_dir: Path | None,
    typed: Sequence[str],
    ranks: Distributed,
) -> tuple[RunPlan, RunLock | None]:
    """Choose the directory of a run that is started from Python. Called on each rank.

    Args:
        run_dir: the directory for the run's files. None: a new one under `outputs/`, or that of the resumed run.
        typed: keys whose values replace those of the checkpoint.
        ranks: all of them get the choice of rank 0.

    Returns:
        The plan, and on rank 0 the lock of the directory, which is free: training takes it.

    Raises:
        UserError: another process trains in the directory, it holds another run, or there is nothing to resume.
    """
    if not ranks.is_main:
        run_dir, checkpoint = (text and Path(text) for text in ranks.from_main(None))
        return RunPlan(cfg=cfg, run_dir=run_dir, checkpoint=checkpoint, typed=typed), None
    with ExitStack() as locks:  # refused before anything is written
        plan, lock = _plan(cfg, run_dir, run_directory.new, locks, key="run_dir")
    ranks.from_main([str(plan.run_dir), None if plan.checkpoint is None else str(plan.checkpoint)])
    return replace(plan, typed=typed), lock


def is_constant(node: DictConfig) -> bool:
    """Return whether `hydra.run` or `hydra.sweep` names one directory, not a new one for each start."""
    written: Any = OmegaConf.to_container(node, resolve=False)
    return not any(new in str(written["dir"]) for new in ("${now:", "${run_id:"))


def _plan(
    cfg: DictConfig,
    named: Path | None,
    new: Callable[[], Path],
    locks: ExitStack,
    *,
    key: str,
    find: checkpoint_to_resume.Find | None = None,
) -> tuple[RunPlan, RunLock]:
    """Choose a directory and a checkpoint, and lock the directory until `locks` closes.

    Args:
        named: the directory that the user has named, if any.
        new: returns the directory of a new run.
        key: the option that names the directory.
        find: of a restarted run.
    """
    patience = PATIENCE if find is None else LEASE  # the machine of rank 0 may have crashed
    lock_key = key if cfg.resume is None else "resume"
    find = find or partial(checkpoint_to_resume.find, cfg, key=key)
    found, _ = find(named)
    if found is not None:
        run_directory.check_links(found, key=lock_key)
    directory = found or named or new()
    lock = RunLock(directory, key=lock_key, patience=patience)
    locks.enter_context(lock)
    found, checkpoint = find(found or named)  # again: another process may have trained there until it was locked
    if found is None and cfg.resume != "auto":
        run_directory.refuse_held(directory, key=key)
    attempt = run_directory.following(directory) if found is not None and run_directory.is_recorded(directory) else None
    known = checkpoint_to_resume.known_checkpoints(directory)
    return RunPlan(cfg=cfg, run_dir=directory, checkpoint=checkpoint, attempt=attempt, known=known), lock


def without_hydra(plan: RunPlan, typed: Sequence[str]) -> RunPlan:
    """Return the plan of a run of the command line, without the node `hydra` in its config."""
    with read_write(plan.cfg), open_dict(plan.cfg):
        plan.cfg.pop("hydra", None)
    return replace(
        plan,
        run_dir=plan.run_dir.absolute(),
        attempt=None if plan.attempt is None else plan.attempt.absolute(),
        is_recorded=True,
        typed=typed,
    )


LOG = "train.log"


def open_run_directory(cfg: DictConfig, plan: RunPlan) -> None:
    """Make the directory of a run, log into it from now on, and record the config, with secrets masked.

    Args:
        cfg: of the plan, with the node `hydra`.
    """
    resolve_output_dir(cfg, plan)
    folder = plan.attempt or plan.run_dir / RECORDS
    folder.mkdir(parents=True, exist_ok=True)
    remember_config(plan.cfg)
    console.set_up(cfg.hydra.verbose, plan.run_dir / LOG)
    config: Any = masked(OmegaConf.to_container(cfg, resolve=False, enum_to_str=True))
    hydra = config.pop("hydra")
    for name, record in {"config": config, "hydra": {"hydra": hydra}, "overrides": hydra["overrides"]["task"]}.items():
        (folder / f"{name}.yaml").write_text(dumped(record), encoding="utf-8")


def resolve_output_dir(cfg: DictConfig, plan: RunPlan) -> None:
    """Let interpolations of `${hydra:…}` in the config of a plan resolve as in the run. `cfg` is as of `begin`."""
    with read_write(cfg.hydra):
        cfg.hydra.runtime.output_dir = str(plan.run_dir)
    OmegaConf.copy_cache(from_config=cfg, to_config=plan.cfg)
