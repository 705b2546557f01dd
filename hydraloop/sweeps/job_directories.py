"""The run directories of a sweep's jobs, as `hydra.sweep.subdir` names them."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

from omegaconf import read_write

from hydraloop.config.checks import explained, hydra_config
from hydraloop.errors import UserError
from hydraloop.files.run_directory import has_trained
from hydraloop.sweeps.compose_jobs import GridComposer
from hydraloop.sweeps.job_source import Job
from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.sweep_directory import SweepDirectory


class JobDirectories:
    """Tells the run directories of jobs, each another one.

    Args:
        grid: composes the jobs.
    """

    def __init__(self, directory: SweepDirectory, grid: GridComposer) -> None:
        self._directory, self._grid = directory, grid
        self._jobs: dict[Path, int] = {}
        """By their directories."""

    def of(self, job: Job, state: JobState) -> str:
        """Return the run directory of a job that is to start, relative to the sweep's. A job keeps its directory.

        Raises:
            UserError: the directory is another job's, holds a run or is outside the sweep's, or the config is wrong.
        """
        directory = self._directory
        if directory.has_numbered_jobs:
            path = directory.path / str(job.number)
        elif directory.run_dir(state) != directory.folder(job.number):
            path = directory.run_dir(state)
        else:
            path = self._named(job)
            self._check_own(path, job)
        if not state.attempts and has_trained(path):
            raise _refused(path, "holds a run already")
        return os.path.relpath(path, directory.path)

    def _check_own(self, path: Path, job: Job) -> None:
        sweep = self._directory
        if not path.resolve().is_relative_to(sweep.path.resolve()):
            raise _refused(path, f"is outside the sweep's directory, {sweep.path}")
        if not self._jobs:
            self._jobs = {sweep.run_dir(found).resolve(): found.number for found in sweep.states()}
        if self._jobs.setdefault(path.resolve(), job.number) != job.number:
            raise _refused(path, "is another job's already")

    def _named(self, job: Job) -> Path:
        cfg = explained(partial(self._grid.compose, number=job.number), job.lines, self._grid.composer)
        with read_write(cfg.hydra):
            cfg.hydra.sweep.dir = str(self._directory.path)
        with hydra_config(cfg):
            return Path(cfg.hydra.sweep.dir, cfg.hydra.sweep.subdir)


def _refused(path: Path, problem: str) -> UserError:
    remedy = "Let it tell the jobs apart: ${hydra.job.num}."
    return UserError(f"{path} {problem}", key="hydra.sweep.subdir", remedy=remedy)
