"""A sweep, from its checked command line to its last line: directory, executor, controller, trackers, results."""

from __future__ import annotations

import secrets
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from hydra._internal.callbacks import Callbacks  # Hydra's callbacks; only `hydra.main` itself makes them otherwise

from hydraloop.cli import command as command_line
from hydraloop.cli.arguments import typed_keys
from hydraloop.cli.compose import Composer
from hydraloop.cli.console import prepare_handlers
from hydraloop.plan import Draft
from hydraloop.processes import checks as launch_checks
from hydraloop.processes.jobs import Jobs
from hydraloop.run_files import code_patch, environment
from hydraloop.safety import hydra_versions
from hydraloop.safety.secrets import remember_overrides
from hydraloop.sweeps import resume_sweep
from hydraloop.sweeps.controller import Controller
from hydraloop.sweeps.detach import CONTROLLER_LOG, detached
from hydraloop.sweeps.executors import gpus, spawned, submitit_executor
from hydraloop.sweeps.executors.executor import Executor
from hydraloop.sweeps.executors.pool import PoolExecutor
from hydraloop.sweeps.grid import GridComposer
from hydraloop.sweeps.job import SweepJob
from hydraloop.sweeps.planning import Plan, SweepDraft
from hydraloop.sweeps.report.display import watching
from hydraloop.sweeps.report.lines import Lines, print_end
from hydraloop.sweeps.source import Grid
from hydraloop.sweeps.sweep_description import Description
from hydraloop.sweeps.sweep_directory import SweepDirectory
from hydraloop.tracking.sweep_trackers import SweepTrackers
from hydraloop.validate import hydra_config


def run(draft: SweepDraft, jobs: Jobs, name: str) -> NoReturn:
    """Run a sweep with our own executors, and exit. A composer has to be open.

    Args:
        draft: of the sweep.
        jobs: trains.
        name: of the primary config.

    Raises:
        UserError: the sweep cannot be started.
    """
    plan = draft.plan
    launch_checks.check_single_run()
    shares = gpus.shares(plan.options, ranks=plan.ranks, device=plan.device)
    if plan.options.executor == "submitit":
        submitit_executor.check(plan.options.submitit)
    background = detached() if plan.master.detach else None
    hydra_versions.configure_log(plan.master.hydra.hydra_logging, plan.master.hydra.verbose)
    prepare_handlers()
    named = "hydra.sweep.dir" in draft.typed
    directory, axes = resume_sweep.settle(
        _path(draft), _description(draft, plan), plan, named=named, follows_links=draft.follows_links
    )
    if background is not None:
        background.log_to(directory.path / CONTROLLER_LOG)
    options, lines = plan.options, Lines(directory)
    trackers = SweepTrackers(axes=draft.axes, jobs=directory.description.axes.count)
    if options.executor != "submitit":  # Slurm ends what a job has started
        trackers.share_senders()
    executor = _executor(
        SweepJob(directory, draft, jobs, plan.grid), plan, spawned.Spawn(directory.path, draft.overrides)
    )
    controller = Controller(
        directory,
        executor,
        Grid(axes, plan.environments(axes, directory.description.configs)),
        shares,
        lines,
        max_retries=options.max_retries,
        stop_on_failure=options.on_failure == "stop",
        retry_failed=options.retry_failed,
    )
    with _shown_to_others(controller, trackers, plan, name), watching(lines) as controller.watcher:
        if controller.left:
            executor.wait_ready()
        if background is not None:
            background.ready(directory.path)
        controller.run()
    print_end(controller)
    sys.exit(controller.code)


def run_received(composer: Composer, jobs: Jobs) -> NoReturn:
    """Run the job for which this process was started, and exit. A composer has to be open."""
    path, overrides, request = spawned.received()
    lines = list(request.lines)
    remember_overrides([*overrides, *lines])
    typed = typed_keys(overrides)
    grid = GridComposer(composer, command_line.compose_sweep(overrides, composer, typed))
    cfg = command_line.compose_job(lines, composer, typed, trains=True, compose=grid.compose)
    directory = SweepDirectory.load(path)
    spawned.take(request)
    sys.exit(SweepJob(directory, Draft(overrides=overrides, cfg=cfg, typed=typed), jobs, grid).run(request))


def _executor(worker: SweepJob, plan: Plan, spawn: spawned.Spawn) -> Executor:
    if plan.options.executor == "submitit":
        return submitit_executor.SubmititExecutor(spawn, plan.options.submitit)
    return PoolExecutor(worker, spawn)


@contextmanager
def _shown_to_others(controller: Controller, trackers: SweepTrackers, plan: Plan, name: str) -> Iterator[None]:
    """Tell Hydra's callbacks, trackers and other controllers of the sweep, and of its end."""
    directory = controller.directory
    callbacks = Callbacks(plan.master)
    callbacks.on_multirun_start(config=plan.master, config_name=name)
    try:
        directory.announce()
        trackers.begin(directory.path)
        yield
    finally:
        controller.executor.close()
        directory.withdraw()
        if directory.controllers():
            trackers.ended = None
        elif controller.left:
            trackers.ended = "interrupted"
        elif controller.failed:
            trackers.ended = "failed"
        trackers.end(directory.path)
        callbacks.on_multirun_end(config=plan.master, config_name=name)


def _path(draft: SweepDraft) -> Path:
    with hydra_config(draft.cfg):
        return Path(draft.cfg.hydra.sweep.dir).absolute()


def _description(draft: SweepDraft, plan: Plan) -> Description:
    return Description(
        uid=secrets.token_hex(8),
        created=time.time(),
        command=(*environment.command(), "-m"),
        overrides=tuple(draft.overrides),
        configs=plan.configs(plan.axes),
        subdir=plan.subdir,
        axes=plan.axes,
        average=plan.options.average,
        git=code_patch.prepare(Path.cwd()),
    )
