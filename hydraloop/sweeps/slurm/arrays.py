"""A sweep as arrays of Slurm: each task is a controller with one slot. So no process stays on the login node."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from hydraloop.errors import UserError
from hydraloop.processes import slurm
from hydraloop.run_files import environment
from hydraloop.sweeps.executors.spawned import command, read_masked, write_masked
from hydraloop.sweeps.slurm import submissions
from hydraloop.sweeps.slurm.submitit_executor import create_executor, is_local, submit_command

_TASKS = 1001
"""`MaxArraySize` by default: the most tasks of an array."""


def is_wanted(master: DictConfig) -> bool:
    """Return whether a command line asks for arrays."""
    options = master.sweep
    return bool(master.detach) and options.executor == "submitit" and not is_local(options.submitit)


def submit(sweep: Path, overrides: Sequence[str], options: DictConfig, tasks: int, at_a_time: int) -> list[str]:
    """Submit the tasks. Return the ids of the arrays. An array starts when the one before it has ended.

    Args:
        sweep: its directory.
        overrides: of the sweep, as typed.
        options: `sweep.submitit`.

    Raises:
        UserError: Slurm refuses an array, or a parameter is wrong.
        OSError: the directory cannot be written to.
    """
    executor = create_executor(sweep, options)
    executor.parameters["array_parallelism"] = at_a_time
    slurm.start_again(executor.parameters, executor.folder)
    lines = [line for line in overrides if not line.startswith(("sweep.resume=", "hydra.sweep.dir="))]
    file = sweep / submissions.FOLDER / f"{time.time_ns()}.json"
    file.parent.mkdir(exist_ok=True)
    content: dict[str, Any] = {"sweep": str(sweep), "submitted": time.time(), "arrays": []}
    variables = write_masked(file, content, overrides=lines)
    submissions.cancel_waiting(sweep)  # of earlier submissions
    most = most_tasks()
    for first in range(0, tasks, most):
        executor.parameters["map_count"] = min(most, tasks - first)
        try:
            array = submit_command(executor, [f"{environment.SWEEP_TASK}={file}", *command()], variables)
        except Exception as error:  # of submitit, for any answer of sbatch
            submitted = f" Submitted until now: {', '.join(content['arrays'])}." if content["arrays"] else ""
            raise UserError(
                f"an array of {executor.parameters['map_count']} tasks could not be submitted: {error}",
                key="sweep.submitit",
                remedy=f"Continue when Slurm accepts it: sweep.resume={sweep}{submitted}",
            ) from error
        content["arrays"].append(array)
        write_masked(file, content, overrides=lines)
        executor.parameters["dependency"] = f"afterany:{array}"
    return list(content["arrays"])


def most_tasks() -> int:
    """Return the most tasks of an array."""
    found = re.search(r"^MaxArraySize\s*=\s*(\d+)", submissions.run("scontrol", "show", "config") or "", re.MULTILINE)
    return _TASKS if found is None else int(found[1])


@dataclass(frozen=True, slots=True)
class Task:
    """What this process knows, if it is a task of an array."""

    overrides: tuple[str, ...]
    """The overrides of the sweep as typed, and `sweep.resume` with its directory."""
    submitted: float
    """When, in seconds since 1970."""
    restarts: int
    """How often Slurm has started it again."""


@cache
def received() -> Task | None:
    """Return what this process knows as a task of an array; None in any other process.

    Raises:
        UserError: the secrets of the sweep are missing.
        OSError: the file of the submission cannot be read.
    """
    path = os.environ.pop(environment.SWEEP_TASK, None)  # not for processes of jobs
    if path is None:
        return None
    content = read_masked(Path(path))
    overrides = (*content["overrides"], f"sweep.resume={content['sweep']}")
    return Task(overrides, content["submitted"], int(os.environ.get("SLURM_RESTART_COUNT", "0")))
