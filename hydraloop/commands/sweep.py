"""A sweep, from its checked command line to its last line: directory, executor, controller, trackers, results."""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import OmegaConf

from hydraloop.commands.report import check_installed, write_report
from hydraloop.config.hydra_keys import variables
from hydraloop.files import code_patch, console, environment
from hydraloop.launch import detach, torchrun
from hydraloop.launch import slurm as launch_slurm
from hydraloop.launch.start import RunStarter
from hydraloop.sweeps import resume_sweep, submit_to_slurm
from hydraloop.sweeps.axes import Lines
from hydraloop.sweeps.check_sweep import SweepDraft
from hydraloop.sweeps.controller import Controller, Watcher
from hydraloop.sweeps.executors import gpus, ray_executor, spawned, submitit_executor
from hydraloop.sweeps.executors.executor import Executor
from hydraloop.sweeps.executors.pool import PoolExecutor
from hydraloop.sweeps.job import SweepJob
from hydraloop.sweeps.job_directories import JobDirectories
from hydraloop.sweeps.job_source import Grid, SearchSource, Source
from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.sweep_directory import Description, SweepDirectory
from hydraloop.sweeps.sweep_display import JobLines, print_end, watching
from hydraloop.tracking.start_sender import SweepSender


def run(draft: SweepDraft, starter: RunStarter) -> NoReturn:
    """Run a sweep with our own executors, and exit. A composer has to be open.

    Args:
        draft: of the sweep.
        starter: trains.

    Raises:
        UserError: the sweep cannot be started.
    """
    os.environ.update(variables(draft.overrides))
    shares = _check(draft)
    console.set_up(draft.master.hydra.verbose)
    if draft.master.detach:
        _detach(draft)
    cluster = None
    if draft.options.executor == "ray":
        cluster = ray_executor.connect(draft.options, ranks=draft.ranks, device=draft.device)
        shares = cluster.shares
    directory, jobs = resume_sweep.open_sweep(_description(draft), draft)  # a second controller is refused there
    lines = JobLines(directory)
    hooks: Any = OmegaConf.to_container(draft.cfg.hooks)
    sender = SweepSender(directory.path, hooks)
    controller = Controller(
        directory,
        _executor(draft, directory, starter, cluster),
        _source(directory, jobs, draft),
        shares,
        lines,
        JobDirectories(directory, draft.grid),
        max_retries=draft.options.max_retries,
        stop_on_failure=draft.options.on_failure == "stop",
        retry_failed=draft.options.retry_failed,
        jobs_outlive_controller=launch_slurm.is_submitted(),
    )
    try:
        with watching(lines) as shown:
            controller.watcher = _Followed(shown, sender, directory)
            if controller.unfinished:
                controller.executor.wait_ready()
            controller.run()
        print_end(controller)  # while it has the lock: `attach` follows it until then
    finally:
        controller.executor.close()
        directory.controller_lock.release()
        sender.end()
    if draft.options.report and not controller.unfinished:  # the sweep is not running any more
        write_report(directory.path)
    sys.exit(controller.exit_code)


def _detach(draft: SweepDraft) -> NoReturn:
    """Let the same command run the sweep, as a job of Slurm or in the background, and exit."""
    is_submitted = submit_to_slurm.is_sweep(draft.master)
    if not is_submitted:
        detach.check()
    directory, _ = resume_sweep.open_sweep(_description(draft), draft)
    if is_submitted:
        submit_to_slurm.submit_sweep(directory, draft)
    directory.controller_lock.release()
    detach.start(draft, "sweep.resume", directory.path, detach.CONTROLLER_LOG, "--multirun")


def _check(draft: SweepDraft) -> gpus.Shares:
    """Check what needs no directory, and divide this machine."""
    options = draft.options
    torchrun.check_single_run()
    shares = gpus.shares(options, ranks=draft.ranks, device=draft.device)
    if options.executor == "submitit":
        submitit_executor.create_executor(Path(), options.submitit)  # its parameters are right
    if options.executor == "ray":
        ray_executor.check(options.ray)
    if options.report:
        check_installed("sweep.report")
    return shares


def _source(directory: SweepDirectory, jobs: Mapping[int, Lines], draft: SweepDraft) -> Source:
    if draft.jobs.search is None:
        return Grid(jobs)
    search = directory.description.jobs.search
    assert search is not None, "the directory has the same search"
    return SearchSource(directory, replace(draft.jobs.search, trials=search.trials), draft.options.enqueue)


def _executor(
    draft: SweepDraft, directory: SweepDirectory, starter: RunStarter, cluster: ray_executor.Cluster | None
) -> Executor:
    spawn = spawned.Spawn(directory.path, draft.overrides)
    if cluster is not None:
        has_own_folder = "working_dir" in (draft.options.ray.get("runtime_env") or {})
        folder = None if has_own_folder else os.getcwd()
        return ray_executor.RayExecutor(cluster, spawn, environment.command()[1:], folder)
    if draft.options.executor == "submitit":
        return submitit_executor.SubmititExecutor(spawn, directory.description.uid, draft.options.submitit)
    return PoolExecutor(SweepJob(directory.path, draft, starter, draft.grid), spawn)


class _Followed:
    """Tells the sender of the sweep of its jobs, and another watcher, too."""

    def __init__(self, watcher: Watcher, sender: SweepSender, directory: SweepDirectory) -> None:
        self._watcher, self._sender, self._directory = watcher, sender, directory

    def started(self, state: JobState) -> None:
        self._sender.job_begins(self._directory.run_dir(state))
        self._watcher.started(state)

    def ended(self, state: JobState) -> None:
        self._sender.job_ends(self._directory.run_dir(state))
        self._watcher.ended(state)

    def update(self) -> None:
        self._sender.check()
        self._watcher.update()


def _description(draft: SweepDraft) -> Description:
    return Description(
        uid=secrets.token_hex(8),
        created=time.time(),
        command=(*environment.command(), "-m"),
        overrides=tuple(draft.overrides),
        configs=draft.configs(draft.jobs),
        subdir=draft.subdir,
        jobs=draft.jobs,
        average=draft.options.average,
        git=code_patch.prepare(Path.cwd()),
    )
