"""A sweep whose jobs another launcher or sweeper of Hydra runs, such as joblib or Optuna."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from hydraloop.cli import hydra_run
from hydraloop.errors import UserError
from hydraloop.plan import Draft, plan_job
from hydraloop.processes import checks as launch_checks
from hydraloop.processes.run_starter import RunStarter
from hydraloop.run_files.lock import RunLock
from hydraloop.run_files.result import Result
from hydraloop.run_files.run_directory import SWEEP_FILES, holds_run
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.safety.secrets import remember_overrides
from hydraloop.validate.config import hydra_config

ACCEPT_NAN = ("hydra_plugins.hydra_nevergrad_sweeper.nevergrad_sweeper.NevergradSweeper",)
"""Sweepers of Hydra to which a diverged job returns NaN. For others it raises its error: Optuna's ends at a NaN."""


def run_sweep(starter: RunStarter, draft: Draft, flags: list[str], folder: Path, name: str) -> None:
    """Train the jobs of a sweep, as Hydra's sweeper and launcher run them. An error has been reported.

    Args:
        starter: trains.
        flags: the arguments that are not overrides.
        folder: with the config files; `name` is that of the primary config.
    """
    launch_checks.check_single_run()
    lines, typed = draft.overrides, draft.typed  # a launcher pickles the job, and cannot pickle the draft
    trust = ALLOWLIST.folders, ALLOWLIST.packages

    def job(cfg: DictConfig, run_dir: Path) -> float | None:
        _begin_process(*trust, lines)
        with ExitStack() as lock:
            try:
                launch_checks.check(cfg)
                if launch_checks.starts_ranks(cfg):
                    problem = "another launcher of Hydra starts one process for each job"
                    raise UserError(problem, key="distributed.nproc_per_node", remedy="Leave hydra/launcher= out.")
                sweep, settings = hydra_run.sweep_dir(), HydraConfig.get()
                plan = plan_job(cfg, settings, run_dir, sweep, lock, typed=typed, held=sweep)
            except UserError as error:
                starter.reports.start_job()
                starter.reports.end_job(error)
                raise
            try:
                return starter.train_by(plan)
            except Exception:
                result = Result.read(run_dir)
                if settings.sweeper._target_ in ACCEPT_NAN and result is not None and result.has_diverged:
                    return math.nan
                raise

    with ExitStack() as locks:
        overrides = _settle(draft, locks)
        interrupted = False
        try:
            hydra_run.run_sweep(job, [*flags, *overrides], folder, name)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            raise
        finally:
            starter.reports.print_sweep(interrupted=interrupted)


def _begin_process(folders: Sequence[str], packages: Sequence[str], overrides: Sequence[str]) -> None:
    """Prepare this process, which a launcher may have started. Not in the job: joblib would copy its globals."""
    for folder in folders:
        ALLOWLIST.trust_folder(Path(folder))
    ALLOWLIST.trust(packages)
    remember_overrides(overrides)


def _settle(draft: Draft, locks: ExitStack) -> list[str]:
    """Lock the directory of a sweep until `locks` closes. Returns the overrides with which Hydra uses it.

    Raises:
        UserError: the directory cannot be written, is locked, or holds a run or a sweep.
    """
    cfg, key = draft.cfg, "hydra.sweep.dir"
    with hydra_config(cfg):
        directory = Path(cfg.hydra.sweep.dir)
    locks.enter_context(RunLock(directory, key=key))
    if holds_run(directory) or any((directory / name).exists() for name in SWEEP_FILES):
        raise UserError(f"{directory} holds a run already", key=key, remedy="Name another directory.")
    others = [line for line in draft.overrides if line.lstrip("+").partition("=")[0] != key]
    return [*others, f"{key}={_quoted(directory)}"]


def _quoted(path: Path) -> str:
    """Return a path as the value of an override."""
    escaped = str(path).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
