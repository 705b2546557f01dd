"""SweepJob: what the process of a job does: claim the job, train it as a single run, and write how it has ended.

The rules of claims are in `queue`.
"""

from __future__ import annotations

import errno
import json
import os
import re
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from copy import deepcopy
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from signal import SIGINT
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from hydraloop.cli.command import compose_job, explained
from hydraloop.cli.compose import Composer
from hydraloop.errors import Terminated, UserError
from hydraloop.plan import Draft, of_hydra, plan_job
from hydraloop.processes import checks as launch_checks
from hydraloop.processes import private, slurm, torchrun
from hydraloop.processes.failure import Requeue
from hydraloop.processes.run_starter import RunStarter
from hydraloop.processes.termination_signals import terminable
from hydraloop.run_files import environment
from hydraloop.run_files.checkpoint_files import END_UNWRITTEN
from hydraloop.run_files.config_yaml import remember_config
from hydraloop.run_files.lock import LEASE, PATIENCE, RunLock, join
from hydraloop.run_files.output import print_to
from hydraloop.run_files.result import describe
from hydraloop.safety.secrets import mask_text
from hydraloop.sweeps import queue, states
from hydraloop.sweeps.executors.executor import LEFT, NOT_RECORDED, Request, Worker
from hydraloop.sweeps.grid import GridComposer
from hydraloop.sweeps.states import JobState
from hydraloop.sweeps.sweep_directory import SweepDirectory
from hydraloop.validate.config import hydra_config

_FULL = (f"[Errno {errno.ENOSPC}]", f"[Errno {errno.EDQUOT}]", END_UNWRITTEN)
"""In errors that are not the job's, or a rank's: it continues when there is space again."""
_POLL = 0.5
_EVERY_JOB = (
    "filelock",
    "hydraloop.builder",
    "hydraloop.tracking.hook",
    "numpy.random",
    "psutil",
    "torch.profiler",
    "torch.utils.serialization.config",
)
"""Modules that each job imports."""


class SweepJob(Worker):
    """Runs jobs of a sweep.

    Args:
        draft: of the sweep, with its first job; without a grid, of the only job.
        starter: trains.
        grid: composes the jobs.
    """

    def __init__(
        self, directory: SweepDirectory, draft: Draft, starter: RunStarter, grid: GridComposer | None = None
    ) -> None:
        self._directory, self._draft, self._starter, self._grid = directory, draft, starter, grid

    def prepare(self) -> None:
        """Import torch, and the parts of hydraloop that the first job names. The user's modules are not imported."""
        for name in _EVERY_JOB:
            import_module(name)
        environment.versions()  # is cached
        if self._grid is not None:
            self._grid.prepare()
        config = str(OmegaConf.to_container(self._draft.cfg, resolve=False))
        for target in re.findall(r"'_target_': '([\w.]+)'", config):
            module, _, name = target.rpartition(".")
            if module.partition(".")[0] in ("hydraloop", "torch"):
                with suppress(ImportError, AttributeError):  # reported by the job
                    getattr(import_module(module), name)

    def run(self, request: Request) -> int:
        """Run a job, unless another process has it. Returns the exit code."""
        folder = Path(request.folder)
        lock = RunLock(folder, key="sweep")
        try:
            with terminable():
                folder.mkdir(parents=True, exist_ok=True)
                print_to(folder / states.LOG)
                state = queue.end(self._directory, request.number, None)  # an attempt that was killed
                until = time.monotonic() + (LEASE if slurm.was_started_again() else 0.0)
                while state.state == "running" and time.monotonic() < until:  # as on a node that does not answer
                    time.sleep(_POLL)
                    state = queue.end(self._directory, request.number, None)
                if slurm.was_started_again() and state.controller == request.controller:
                    request = replace(request, attempts=state.attempts)
                if lock.try_acquire(PATIENCE) is not None:
                    return LEFT
                claimed = queue.claim(self._directory, request)
                return LEFT if claimed is None else self._run(request, claimed)
        except KeyboardInterrupt as error:
            return _exit_code(error)
        except (OSError, UserError) as error:  # a full disk
            with suppress(OSError):
                print(f"error: the state of the job cannot be written: {error}", file=sys.stderr, flush=True)
            return NOT_RECORDED
        finally:
            lock.release()

    def _run(self, request: Request, state: JobState) -> int:
        """Run the job that this process has claimed, and write its end. Returns the exit code."""
        folder = Path(request.folder)
        error: BaseException | None = None

        def note(**changed: Any) -> None:
            nonlocal state
            state = replace(state, **changed)
            states.write(folder, state, flush=False)

        try:
            with ExitStack() as locks:
                cfg = self._config(request)
                with read_write(cfg.hydra):
                    cfg.hydra.sweep.dir = str(self._directory.path)
                locks.enter_context(hydra_config(cfg))
                launch_checks.check(cfg)
                run_dir, plan = Path(cfg.hydra.sweep.dir, cfg.hydra.sweep.subdir), None
                if not launch_checks.starts_ranks(cfg):
                    plan = plan_job(
                        self._config(request),  # twice as fast as a copy
                        cfg.hydra,
                        run_dir,
                        self._directory.path,
                        locks,
                        typed=self._draft.typed,
                        held=folder,
                        continues=state.attempts > 1,
                    )
                    run_dir = plan.run_dir
                directory = os.path.relpath(run_dir, self._directory.path)
                if directory != state.directory:
                    note(directory=directory)
                    told = states.ended_from_result(state, run_dir)
                    if state.attempts > 1 and told is not None and told.is_over:  # its state was damaged
                        states.write(folder, told, flush=True)
                        return 0
                self._starter.on_build = lambda iterations: note(total=iterations)
                if plan is None:
                    self._start_ranks(cfg, request, continues=state.attempts > 1)
                else:
                    self._starter.train(cfg, plan)
        except BaseException as raised:
            error = first_signal(raised)
            self._starter.reports.show(error)
        run_dir = self._directory.run_dir(state)
        is_told = error is None and run_dir == folder  # `result.json` is on the disk, if this file is lost
        states.write(folder, _ended(state, run_dir, error), flush=not is_told)
        return _exit_code(error)

    def _start_ranks(self, cfg: DictConfig, request: Request, *, continues: bool) -> None:
        known = {
            "number": request.number,
            "folder": str(Path(request.folder).absolute()),
            "sweep": str(self._directory.path.absolute()),
            "typed": list(self._draft.typed),
            "continues": continues,
        }
        lines = [*cfg.hydra.overrides.hydra, *cfg.hydra.overrides.task]
        command = environment.command()[1:]
        self._starter.start_ranks(cfg, command, lines, variables={private.RANK_JOB: json.dumps(known)})

    def _config(self, request: Request) -> DictConfig:
        if self._grid is None:
            return deepcopy(self._draft.cfg)
        return explained(partial(self._grid.compose, number=request.number), request.lines, self._grid.composer)


def train_rank(job: Mapping[str, Any], lines: Sequence[str], composer: Composer, starter: RunStarter) -> None:
    """Train as one of the ranks of a job.

    Args:
        job: what `SweepJob` has told.
        lines: the overrides of the job, with those of the sweep that are for Hydra.
        composer: is open.
    """
    cfg = compose_job(lines, composer, job["typed"], trains=True)
    with read_write(cfg.hydra), open_dict(cfg.hydra):
        cfg.hydra.job.id, cfg.hydra.job.num = str(job["number"]), job["number"]
        cfg.hydra.sweep.dir = job["sweep"]
    remember_config(cfg)
    sweep, folder, own = Path(job["sweep"]), Path(job["folder"]), deepcopy(cfg)
    with ExitStack() as locks, hydra_config(cfg):
        launch_checks.check(cfg)
        if torchrun.rank() > 0:
            plan = starter.peers.follow(
                cfg, lambda found: of_hydra(replace(found, cfg=own), cfg.hydra, job["typed"]), None
            )
        else:
            join(folder)
            plan = plan_job(
                own,
                cfg.hydra,
                Path(cfg.hydra.sweep.dir, cfg.hydra.sweep.subdir),
                sweep,
                locks,
                typed=job["typed"],
                held=folder,
                continues=job["continues"] or torchrun.attempt() > 0,
            )
            plan = starter.peers.lead(cfg, plan, None)
        starter.train(cfg, plan)


def first_signal(error: BaseException) -> BaseException:
    """Return the signal after which an error was raised, as in OmegaConf while it composes; otherwise the error."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, KeyboardInterrupt):
        found = found.__context__
    return found or error


def _ended(state: JobState, run_dir: Path, error: BaseException | None) -> JobState:
    """Return the state of a job that has ended, or has raised an error."""
    told = states.ended_from_result(state, run_dir)
    if error is None:
        error = None if told is not None else RuntimeError("the run has written no result.json")
    if error is None or (told is not None and isinstance(error, KeyboardInterrupt)):
        assert told is not None
        return told  # a signal at the end of a run does not change how it has ended
    ended = told or states.end(state, time.time())
    text = mask_text(describe(error))
    is_killed = isinstance(error, KeyboardInterrupt) or getattr(error, "was_killed", False)  # it, or a rank
    if is_killed or any(number in text for number in _FULL):
        return replace(ended, state="interrupted", error=None, reason=text)
    return replace(ended, state="failed", error=text, reason=None)


def _exit_code(error: BaseException | None) -> int:
    """Return the exit code of a job whose state is written."""
    if not isinstance(error, KeyboardInterrupt):
        return 0
    return (
        error.code if isinstance(error, Requeue) else 128 + (error.number if isinstance(error, Terminated) else SIGINT)
    )
