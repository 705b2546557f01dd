"""SweepJob: what the process of a job does. It trains as a single run, in the directory that its controller names.

The process writes only into this directory and into its log. When it has ended, the controller reads `result.json`
there, and decides about a retry.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, read_write

from hydraloop.config import checks
from hydraloop.config.arguments import typed_keys
from hydraloop.config.checks import Draft, compose_job, explained, hydra_config
from hydraloop.config.compose import Composer
from hydraloop.config.hydra_keys import variables
from hydraloop.files import environment
from hydraloop.files.config_yaml import remember_config
from hydraloop.files.lock import LEASE, PATIENCE, RunLock
from hydraloop.files.result import ResultFile
from hydraloop.files.secrets import remember_overrides
from hydraloop.files.terminal import print_to
from hydraloop.launch import slurm, torchrun
from hydraloop.launch.exit import REQUEUE, exit_code
from hydraloop.launch.plan import plan_job
from hydraloop.launch.start import RunStarter
from hydraloop.launch.termination import owner_has_ended, terminable
from hydraloop.sweeps import job_states, submit_to_slurm
from hydraloop.sweeps.compose_jobs import GridComposer, set_number
from hydraloop.sweeps.executors import spawned
from hydraloop.sweeps.executors.executor import Request, Worker
from hydraloop.sweeps.job_states import UNUSABLE

_EVERY_JOB = (
    "filelock",
    "hydraloop.launch.build",
    "hydraloop.tracking.tracker_hook",
    "numpy.random",
    "psutil",
    "torch.profiler",
    "torch.utils.serialization.config",
)
"""Modules that each job imports. The fork server imports them once for all jobs."""


class SweepJob(Worker):
    """Runs jobs of a sweep: the only job of a new Python process, or the jobs of a fork server, each in a fork.

    Args:
        sweep: the directory of the sweep.
        draft: the draft of the sweep, with the config of its first job. Without `grid`: the draft of the only job.
        starter: trains.
        grid: composes the configs of the jobs.
    """

    def __init__(self, sweep: Path, draft: Draft, starter: RunStarter, grid: GridComposer | None = None) -> None:
        self._sweep = sweep
        self._draft = draft
        self._starter = starter
        self._grid = grid

    def prepare(self) -> None:
        """Import torch, and the parts of hydraloop that the first job names. The user's modules are not imported."""
        for name in _EVERY_JOB:
            import_module(name)
        environment.versions()  # cached: reading them takes time
        config = str(OmegaConf.to_container(self._draft.cfg, resolve=False))
        for target in re.findall(r"'_target_': '([\w.]+)'", config):
            module, _, name = target.rpartition(".")
            if module.partition(".")[0] in ("hydraloop", "torch"):
                with suppress(ImportError, AttributeError):  # reported by the job
                    getattr(import_module(module), name)

    def run(self, request: Request) -> int:
        """Run a job, write how it has ended into its run directory, and return the exit code.

        The exit code is that of a single run. It is UNUSABLE if an error could not be written into `result.json`:
        another process has locked the directory, or the disk is full.
        """
        folder = Path(request.folder)
        result: ResultFile | None = None
        try:
            with terminable(), ExitStack() as locks:
                folder.mkdir(parents=True, exist_ok=True)
                print_to(folder / job_states.LOG)
                locks.enter_context(_lock(Path(request.run_dir)))

                # The controller may have died while this process waited for the lock. Its successor starts the job.
                if owner_has_ended():
                    return REQUEUE
                # Two processes may be started for an attempt: Slurm starts another one after the death of a slurmd, and
                # the pool if a fork server was killed before it had said that it has started the first one.
                if _has_ended(request):
                    return 0

                result = ResultFile(Path(request.run_dir))
                try:
                    self._train(request, locks)
                except BaseException as raised:
                    if not result.is_complete:  # a signal at the end does not change how the run has ended
                        result.set_error(first_signal(raised))
                    raise
        except BaseException as raised:
            error = first_signal(raised)
            with suppress(OSError):  # a full disk
                self._starter.reports.show(error)
            # The controller reads the error in `result.json`. The exit code is enough for a signal, which Python and
            # `terminable` raise as a KeyboardInterrupt.
            is_signal = isinstance(error, KeyboardInterrupt)
            is_in_result = result is not None and result.has(error)
            return exit_code(error) if is_signal or is_in_result else UNUSABLE
        return 0

    def _train(self, request: Request, locks: ExitStack) -> None:
        """Train in this process, or start ranks.

        Args:
            locks: the lock of the run directory, which this process has. Ranks are other processes: it is released
                before they start, and rank 0 acquires it.
        """
        run_dir = Path(request.run_dir)
        cfg = self._config(request)
        with hydra_config(cfg):
            _place(cfg, self._sweep, run_dir)
            torchrun.check_options(cfg)
            if torchrun.starts_ranks(cfg):
                locks.close()
                self._start_ranks(cfg, request)
                return
            own = self._config(request)  # without the node `hydra`; composing is twice as fast as a copy
            plan = plan_job(own, run_dir, typed=self._draft.typed)
            self._starter.train(cfg, plan)

    def _start_ranks(self, cfg: DictConfig, request: Request) -> None:
        job = {
            "number": request.number,
            "sweep": str(self._sweep),
            "run_dir": request.run_dir,
            "typed": list(self._draft.typed),
            "objectives": dict(cfg.sweep.objectives),
        }
        overrides: Any = OmegaConf.to_container(cfg.hydra.overrides, resolve=False)  # the ranks resolve interpolations
        lines = [*overrides["hydra"], *overrides["task"]]
        command = environment.command()[1:]
        self._starter.start_ranks(cfg, command, lines, variables={torchrun.RANK_JOB: json.dumps(job)})

    def _config(self, request: Request) -> DictConfig:
        if self._grid is None:
            return deepcopy(self._draft.cfg)
        return explained(partial(self._grid.compose, number=request.number), request.lines, self._grid.composer)


def train_rank(job: Mapping[str, Any], lines: Sequence[str], composer: Composer, starter: RunStarter) -> None:
    """Train as one of the ranks of a job.

    Args:
        job: what `SweepJob` has written into the environment of the ranks.
        lines: the overrides of the job, and the overrides of the sweep that are for Hydra.
        composer: has to be open.
    """
    cfg = compose_job(lines, composer, trains=True)
    set_number(cfg, job["number"])
    cfg.sweep.objectives = job["objectives"]
    remember_config(cfg)
    run_dir = Path(job["run_dir"])
    own = deepcopy(cfg)
    with ExitStack() as locks, hydra_config(cfg):
        _place(cfg, Path(job["sweep"]), run_dir)
        torchrun.check_options(cfg)
        if torchrun.rank() > 0:
            plan = starter.peers.receive_plan(cfg, lambda plan: replace(plan, cfg=own).without_hydra(job["typed"]))
        else:
            locks.enter_context(_lock(run_dir))
            plan = plan_job(own, run_dir, typed=job["typed"])
            plan = starter.peers.send_plan(cfg, plan)
        starter.train(cfg, plan)


def _lock(run_dir: Path) -> RunLock:
    """Return the lock of a run directory. After the death of a node, a file server keeps the lock for a while."""
    return RunLock(run_dir, key="hydra.sweep.subdir", patience=LEASE if slurm.was_started_again() else PATIENCE)


def _has_ended(request: Request) -> bool:
    """Return whether this attempt of a job is over, by its `result.json`."""
    running = job_states.read(Path(request.folder))
    ended = None if running is None else job_states.ended_from_result(running, Path(request.run_dir))
    return ended is not None and ended.is_over


def _place(cfg: DictConfig, sweep: Path, run_dir: Path) -> None:
    """Write the directories of the sweep and of the run into the node `hydra`, for interpolations of `${hydra:…}`."""
    with read_write(cfg.hydra):
        cfg.hydra.sweep.dir = str(sweep)
        if Path(sweep, cfg.hydra.sweep.subdir) != run_dir:  # the controller has resolved `${now:}` at another time
            cfg.hydra.sweep.subdir = str(run_dir.relative_to(sweep))


def first_signal(error: BaseException) -> BaseException:
    """Return the signal that has led to an error, else the error. OmegaConf turns a signal into an error of its own."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__context__
    return cause or error


def arguments_of_process(argv: Sequence[str]) -> list[str]:
    """Return the arguments of this process. A job of Slurm has more of them in a file."""
    submitted = submit_to_slurm.submitted_overrides() if environment.SUBMITTED in os.environ else []
    return [*argv, *submitted]


def run_job_and_exit(composer: Composer, starter: RunStarter) -> None:
    """If this process was started for a job of a sweep, run the job, and exit with its code.

    A composer has to be open.
    """
    if environment.SWEEP_JOB not in os.environ:
        return
    path, overrides, request = spawned.read_request()
    remember_overrides([*overrides, *request.lines])
    os.environ.update(variables(overrides))
    grid = GridComposer(composer, checks.compose_sweep(overrides, composer))
    compose = partial(grid.compose, number=request.number)
    cfg = checks.compose_job(request.lines, composer, trains=True, compose=compose)
    draft = Draft(overrides=request.lines, cfg=cfg, typed=typed_keys(overrides))
    sys.exit(SweepJob(path, draft, starter).run(request))
