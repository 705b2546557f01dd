"""Plans a run with a checked config: chooses its directory, locks it, and finds the checkpoint where the run continues.

Each rank has the checked config as a `Draft`. Rank 0 makes a `RunPlan` from it, and all ranks train by this plan.
Imports no torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hydraloop.config.checks import Draft
from hydraloop.files import checkpoint_to_resume, console, run_directory
from hydraloop.files.checkpoint_to_resume import FindResumePoint
from hydraloop.files.config_yaml import dumped, remember_config
from hydraloop.files.lock import LEASE, PATIENCE, RunLock
from hydraloop.files.run_directory import RECORDS
from hydraloop.files.secrets import masked

if TYPE_CHECKING:
    from hydraloop.engine.distributed.comm import Distributed

LOG = "train.log"
"""The log of a run, in its directory."""
_PATHS = ("run_dir", "checkpoint", "attempt")
"""The fields of `RunPlan` that rank 0 sends to the other ranks. They compose the config themselves."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunPlan:
    """What all ranks need to know to train a run, whose directory is locked."""

    cfg: DictConfig
    """The validated config, without the node `hydra`."""
    run_dir: Path
    """The directory of the run."""
    checkpoint: Path | None = None
    """The file from which the run continues. None: the run starts from the beginning."""
    attempt: Path | None = None
    """The folder for the records of this attempt to resume the run, `.hydra/resume_<n>`; None for a new run."""
    is_recorded: bool = False
    """Whether the command line records the config, as Hydra does. Otherwise, `build` records it."""
    known_checkpoints: Sequence[str] = ()
    """The checkpoints that were in the directory before this attempt (`known_checkpoints`)."""
    typed: Sequence[str] = ()
    """The keys that the user has typed. Their values replace those of the checkpoint."""

    def paths(self) -> dict[str, str | None]:
        """Return the paths of the plan as absolute paths, for JSON."""
        paths: dict[str, Path | None] = {name: getattr(self, name) for name in _PATHS}
        return {name: None if path is None else str(path.absolute()) for name, path in paths.items()}

    @classmethod
    def from_paths(cls, cfg: DictConfig, paths: Mapping[str, str | None]) -> Self:
        """Return the plan of another process, by its `paths`."""
        given: Any = {name: None if paths[name] is None else Path(str(paths[name])) for name in _PATHS}
        return cls(cfg=cfg, **given)

    def without_hydra(self, typed: Sequence[str]) -> Self:
        """Return the plan of a run of the command line, with absolute paths.

        The node `hydra` is removed from the config of this plan.

        Args:
            typed: see the field.
        """
        with read_write(self.cfg), open_dict(self.cfg):
            self.cfg.pop("hydra", None)
        return replace(
            self,
            run_dir=self.run_dir.absolute(),
            attempt=None if self.attempt is None else self.attempt.absolute(),
            is_recorded=True,
            typed=typed,
        )


def plan_run(draft: Draft, locks: ExitStack, restart: FindResumePoint | None = None) -> RunPlan:
    """Choose the directory of a run of the command line, lock it, and write it into the node `hydra` of the config.

    Called where interpolations of `${hydra:…}` resolve.

    Args:
        draft: the checked config of a single run.
        locks: holds the lock until it closes.
        restart: finds where the run continues, if torchrun has restarted it. None: this is the first start.

    Raises:
        UserError: the directory cannot be written, is locked, holds a run or has links to other places, or there is
            nothing to resume.
    """
    cfg = draft.cfg
    key = "hydra.run.dir"
    directory = Path(cfg.hydra.run.dir)
    is_named = key in draft.typed or (cfg.resume == "auto" and is_constant(cfg.hydra.run))
    named = directory if is_named else None
    plan, _ = _choose_and_lock(cfg, named, lambda: directory, locks, key=key, restart=restart)
    if restart is None and cfg.resume == "auto" and plan.checkpoint is None:
        print(f"{directory} has no checkpoint: a new run starts there", file=sys.stderr)
    return plan_of_draft(plan, draft)


def plan_of_draft(plan: RunPlan, draft: Draft) -> RunPlan:
    """Return the plan with a copy of the draft's config. The directory is written into the draft's node `hydra`."""
    with read_write(draft.cfg.hydra):
        draft.cfg.hydra.run.dir = str(plan.run_dir)
    return replace(plan, cfg=deepcopy(draft.cfg)).without_hydra(draft.typed)


def plan_job(cfg: DictConfig, run_dir: Path, *, typed: Sequence[str]) -> RunPlan:
    """Plan the job of a sweep, whose directory is locked. It continues from its newest checkpoint, if it has one.

    Args:
        cfg: the config of the job. Its node `hydra` is removed.
        run_dir: the directory of the job.
        typed: the keys that the command line of the sweep sets.

    Raises:
        UserError: all checkpoints of the job are damaged.
    """
    checkpoint = checkpoint_to_resume.newest_checkpoint(run_dir)
    attempt = None if checkpoint is None else run_directory.next_attempt(run_dir)
    known = checkpoint_to_resume.known_checkpoints(run_dir)
    plan = RunPlan(cfg=cfg, run_dir=run_dir, checkpoint=checkpoint, attempt=attempt, known_checkpoints=known)
    return plan.without_hydra(typed)


def plan_build(
    cfg: DictConfig,
    run_dir: Path | None,
    typed: Sequence[str],
    ranks: Distributed,
) -> tuple[RunPlan, RunLock | None]:
    """Choose the directory of a run that is started from Python. Called on each rank.

    Args:
        cfg: the validated config.
        run_dir: the directory for the run's files. None: the one of the resumed run, or a new one under `outputs/`.
        typed: the keys whose values replace those of the checkpoint.
        ranks: rank 0 chooses, and sends its choice to the other ranks.

    Returns:
        The plan, and on rank 0 the lock of the directory. The lock is free again; training acquires it.

    Raises:
        UserError: another process trains in the directory, it holds another run, or there is nothing to resume.
    """
    if not ranks.is_main:
        return replace(RunPlan.from_paths(cfg, ranks.from_main(None)), typed=typed), None
    # Lock the directory for a moment, so that one that is in use is refused before anything is written.
    with ExitStack() as locks:
        plan, lock = _choose_and_lock(cfg, run_dir, run_directory.new_run_dir, locks, key="run_dir")
    ranks.from_main(plan.paths())
    return replace(plan, typed=typed), lock


def is_constant(node: DictConfig) -> bool:
    """Return whether `hydra.run` or `hydra.sweep` names one directory, not a new one for each start."""
    written: Any = OmegaConf.to_container(node, resolve=False)
    return not any(new in str(written["dir"]) for new in ("${now:", "${run_id:"))


def _choose_and_lock(
    cfg: DictConfig,
    named: Path | None,
    new: Callable[[], Path],
    locks: ExitStack,
    *,
    key: str,
    restart: FindResumePoint | None = None,
) -> tuple[RunPlan, RunLock]:
    """Choose a directory and a checkpoint, and lock the directory until `locks` closes.

    Args:
        cfg: the validated config.
        named: the directory that the user has named, if any.
        new: returns the directory of a new run.
        locks: holds the lock until it closes.
        key: the option that names the directory, for errors.
        restart: finds where a restarted run continues. None: by the option `resume`.
    """
    find = restart or partial(checkpoint_to_resume.find, cfg, key=key)
    key_of_choice = key if cfg.resume is None else "resume"

    # The directory: that of the resumed run, else the named one, else a new one.
    resumed = find(named).run_dir
    if resumed is not None:
        run_directory.check_links(resumed, key=key_of_choice)
    directory = resumed or named or new()

    # If the machine of rank 0 has crashed, its lock is free only after the lease. So a restart waits for so long.
    lock = RunLock(directory, key=key_of_choice, patience=PATIENCE if restart is None else LEASE)
    locks.enter_context(lock)

    # Before the directory was locked, another process may have trained in it: find the checkpoint a second time.
    resumed, checkpoint = find(resumed or named)
    if resumed is None and cfg.resume != "auto":
        run_directory.refuse_held(directory, key=key)
    attempt = None
    if resumed is not None and run_directory.is_recorded(directory):
        attempt = run_directory.next_attempt(directory)
    known = checkpoint_to_resume.known_checkpoints(directory)
    return RunPlan(cfg=cfg, run_dir=directory, checkpoint=checkpoint, attempt=attempt, known_checkpoints=known), lock


def open_run_directory(cfg: DictConfig, plan: RunPlan) -> None:
    """Make the directory of a run, write the log into it from now on, and record the config, with secrets masked.

    Args:
        cfg: the config of the plan, with the node `hydra`.
        plan: of the run.
    """
    set_output_dir(cfg, plan)
    folder = plan.attempt or plan.run_dir / RECORDS
    folder.mkdir(parents=True, exist_ok=True)
    remember_config(plan.cfg)
    console.set_up(cfg.hydra.verbose, plan.run_dir / LOG)
    config: Any = masked(OmegaConf.to_container(cfg, resolve=False, enum_to_str=True))
    hydra = config.pop("hydra")
    for name, record in {"config": config, "hydra": {"hydra": hydra}, "overrides": hydra["overrides"]["task"]}.items():
        (folder / f"{name}.yaml").write_text(dumped(record), encoding="utf-8")


def set_output_dir(cfg: DictConfig, plan: RunPlan) -> None:
    """Let interpolations of `${hydra:runtime.output_dir}` resolve to the directory of the plan, also in its config.

    Args:
        cfg: the config of the plan, with the node `hydra`.
        plan: of the run.
    """
    with read_write(cfg.hydra):
        cfg.hydra.runtime.output_dir = str(plan.run_dir)
    OmegaConf.copy_cache(from_config=cfg, to_config=plan.cfg)
