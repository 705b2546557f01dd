"""A command that is a job of Slurm: the controller of a sweep, or a single run, with `detach=true`.

Slurm starts the job again under its id, with the same command, at its time limit and after the death of its node.
"""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NoReturn

from omegaconf import DictConfig

from hydraloop.config.checks import Draft, hydra_config
from hydraloop.errors import UserError
from hydraloop.files import environment
from hydraloop.launch import slurm
from hydraloop.launch.detach import CONTROLLER_LOG, RUN_LOG, continued, print_commands, without
from hydraloop.launch.plan import plan_run
from hydraloop.sweeps.check_sweep import SweepDraft
from hydraloop.sweeps.executors import slurm_queue
from hydraloop.sweeps.executors.spawned import command, read_masked, write_masked
from hydraloop.sweeps.executors.submitit_executor import KEY, create_executor, submit_command
from hydraloop.sweeps.sweep_directory import SweepDirectory

_PARAMETERS = """
    array_parallelism cpus_per_gpu cpus_per_task exclusive gpus_per_node gpus_per_task gres mem mem_gb mem_per_cpu
    mem_per_gpu nodelist nodes ntasks_per_node tasks_per_node
"""
_OF_JOBS = frozenset(_PARAMETERS.split())
"""Parameters that a controller does not get. It needs one CPU."""


def is_sweep(master: DictConfig) -> bool:
    """Return whether a command line asks for a controller on Slurm."""
    return bool(master.detach) and master.sweep.executor == "submitit"


def is_run(draft: Draft) -> bool:
    """Return whether a command line asks for a run on Slurm. A config file cannot: it would move a run silently."""
    return "sweep.executor" in draft.typed and draft.cfg.sweep.executor == "submitit"


def submit_sweep(directory: SweepDirectory, draft: SweepDraft) -> NoReturn:
    """Submit the controller of a sweep, print what to type next, and exit.

    Raises:
        UserError: Slurm refuses the job, or has a controller of the sweep.
    """
    given: Any = draft.options.submitit
    options = {name: value for name, value in given.items() if name.removeprefix("slurm_") not in _OF_JOBS}
    first = continued(draft.overrides, "sweep.resume", directory.path)
    again = without(first, "sweep.retry_failed=")  # once
    path, uid = directory.path, directory.description.uid
    _submit(path, uid, options, first, again, path / CONTROLLER_LOG, ["--multirun"], "attach")
    sys.exit(0)


def submit_run(draft: Draft) -> None:
    """Choose the directory of a run, submit the run, and print what to type next.

    Raises:
        UserError: a parameter or the directory is wrong, or Slurm refuses the job.
    """
    if not draft.cfg.detach:
        problem = "a run that is submitted to Slurm does not stay in the terminal"
        raise UserError(problem, key="sweep.executor", remedy="Add detach=true, or leave out sweep.executor.")
    options = {"nodes": draft.cfg.distributed.nnodes, **draft.cfg.sweep.submitit}
    create_executor(Path(), options)  # its parameters are right
    with ExitStack() as locks, hydra_config(draft.cfg):
        run_dir = plan_run(draft, locks).run_dir
    lines = continued(without(draft.overrides, "sweep.executor=", "sweep.submitit"), "hydra.run.dir", run_dir)
    again = [*without(lines, "resume="), "resume=auto"]
    _submit(run_dir, secrets.token_hex(8), options, lines, again, run_dir / RUN_LOG, [])


def _submit(
    path: Path,
    uid: str,
    options: Mapping[str, Any],
    first: list[str],
    again: list[str],
    log: Path,
    flags: list[str],
    *shown: str,
) -> None:
    """Submit a command.

    Args:
        path: its directory.
        uid: of the directory.
        options: parameters of submitit.
        first, again: the overrides of the first start, and of all others.
        log: what it prints.
        flags: of the command.
        shown: commands to print, in addition to the usual ones.
    """
    queue = slurm_queue.jobs(path)
    if queue is None:
        raise UserError("Slurm does not answer", key=KEY, remedy="Look at it: squeue --me")
    if slurm_queue.MAIN in queue:
        problem = f"job {queue[slurm_queue.MAIN].id} of Slurm runs this command already"
        raise UserError(problem, key=KEY, remedy=f"End it: {environment.without_project('stop', path)}")
    executor = create_executor(path / slurm_queue.FOLDER / slurm_queue.MAIN, options)
    file = executor.folder / slurm_queue.COMMAND
    file.parent.mkdir(parents=True, exist_ok=True)
    variables = write_masked(file, {"uid": uid}, first=first, again=again)
    name = slurm_queue.name_of(options, uid, slurm_queue.MAIN)
    try:
        job = submit_command(executor, name, [f"{environment.SUBMITTED}={file}", *command(), *flags], variables, log)
    except Exception as error:  # of submitit, for any answer of sbatch
        raise UserError(f"the command could not be submitted: {error}", key=KEY) from error
    print_commands(path, f"is job {job} of Slurm", "status", *shown, "stop")


def submitted_overrides() -> list[str]:
    """Return the overrides of the command that this process is.

    Raises:
        UserError: the secrets of the command are missing.
        OSError: the file of the submission cannot be read.
    """
    content = read_masked(Path(os.environ.pop(environment.SUBMITTED)))  # not for other processes
    lines: list[str] = content["again" if slurm.was_started_again() else "first"]
    return lines
