"""Processes that hydraloop has started for a given work: a job, the jobs of an actor, a command on Slurm."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

from hydraloop.cli import command
from hydraloop.cli.arguments import typed_keys
from hydraloop.cli.compose import Composer
from hydraloop.plan import Draft
from hydraloop.processes import slurm
from hydraloop.processes.failure import REQUEUE
from hydraloop.processes.run_starter import RunStarter
from hydraloop.processes.termination_signals import end_with
from hydraloop.run_files import environment
from hydraloop.run_files.config_yaml import remember_config
from hydraloop.safety.secrets import remember_overrides
from hydraloop.sweeps.executors import fork_server, spawned
from hydraloop.sweeps.grid import GridComposer
from hydraloop.sweeps.job import SweepJob
from hydraloop.sweeps.slurm import submitted
from hydraloop.sweeps.states import REQUEST
from hydraloop.sweeps.sweep_directory import SweepDirectory


def arguments(argv: Sequence[str]) -> list[str]:
    """Return the arguments of this process, with those that a job of Slurm has in a file."""
    return [*argv, *submitted.received()] if environment.SUBMITTED in os.environ else [*argv]


def run_jobs(composer: Composer, starter: RunStarter) -> None:
    """Run the jobs of a sweep for which this process was started, and exit. Return if it has another work.

    A composer has to be open.
    """
    if environment.SWEEP_JOB in os.environ:
        _run_job(composer, starter)
    if environment.SWEEP_SERVER in os.environ:
        _serve_jobs(composer, starter)


def _run_job(composer: Composer, starter: RunStarter) -> NoReturn:
    """Run one job."""
    owner = os.environ.pop(environment.SWEEP_OWNER, None)  # Slurm's jobs have none
    if owner is not None:
        end_with(int(owner))
    path, overrides, request = spawned.received()
    remember_overrides([*overrides, *request.lines])
    typed = typed_keys(overrides)
    compose = partial(
        GridComposer(composer, command.compose_sweep(overrides, composer, typed)).compose, number=request.number
    )
    cfg = command.compose_job(request.lines, composer, typed, trains=True, compose=compose)
    directory = SweepDirectory.load(path)
    spawned.refuse_withdrawn(request)
    code = SweepJob(directory, Draft(overrides=request.lines, cfg=cfg, typed=typed), starter).run(request)
    if code != REQUEUE:  # Slurm starts the job again with the same request
        Path(request.folder, REQUEST).unlink(missing_ok=True)
    if code == 0 and slurm.is_submitted() and directory.state(request.number).state == "failed":
        code = 1  # sacct and Slurm's mails say FAILED
    sys.exit(code)


def _serve_jobs(composer: Composer, starter: RunStarter) -> NoReturn:
    """Fork the jobs of a sweep that a worker of Ray asks for, until it has ended."""
    connection = Connection(int(os.environ.pop(environment.SWEEP_SERVER)))
    begin = fork_server.receive(connection)
    overrides, lines = begin["overrides"], begin["lines"]
    remember_overrides([*overrides, *lines])
    typed = typed_keys(overrides)
    grid = GridComposer(composer, command.compose_sweep(overrides, composer, typed))
    draft = Draft(overrides=lines, cfg=grid.compose(lines), typed=typed)
    remember_config(draft.cfg)
    worker = SweepJob(SweepDirectory.load(Path(begin["sweep"])), draft, starter, grid)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks Ctrl-C
    os._exit(fork_server.Server(worker, connection).serve())
