"""Processes that hydraloop has started for a given work: a job, or a command on Slurm."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from functools import partial

from hydraloop.config import checked
from hydraloop.config.arguments import typed_keys
from hydraloop.config.checked import Draft
from hydraloop.config.compose import Composer
from hydraloop.config.hydra_keys import variables
from hydraloop.files import environment
from hydraloop.files.secrets import remember_overrides
from hydraloop.launch.run_starter import RunStarter
from hydraloop.sweeps.executors import spawned
from hydraloop.sweeps.grid import GridComposer
from hydraloop.sweeps.job import SweepJob
from hydraloop.sweeps.slurm import submitted


def arguments(argv: Sequence[str]) -> list[str]:
    """Return the arguments of this process, with those that a job of Slurm has in a file."""
    return [*argv, *submitted.received()] if environment.SUBMITTED in os.environ else [*argv]


def run_job(composer: Composer, starter: RunStarter) -> None:
    """Run the job of a sweep for which this process was started, and exit. Return if it has another work.

    A composer has to be open.
    """
    if environment.SWEEP_JOB not in os.environ:
        return
    path, overrides, request = spawned.received()
    remember_overrides([*overrides, *request.lines])
    os.environ.update(variables(overrides))
    grid = GridComposer(composer, checked.compose_sweep(overrides, composer))
    compose = partial(grid.compose, number=request.number)
    cfg = checked.compose_job(request.lines, composer, trains=True, compose=compose)
    draft = Draft(overrides=request.lines, cfg=cfg, typed=typed_keys(overrides))
    sys.exit(SweepJob(path, draft, starter).run(request))
