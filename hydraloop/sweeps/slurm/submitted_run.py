"""A single run as a job of Slurm: `python train.py sweep.executor=submitit detach=true`.

The job starts again under its id, as the jobs of a sweep do, and continues from the newest checkpoint.
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from pathlib import Path

from hydraloop import json_answers
from hydraloop.errors import UserError
from hydraloop.plan import Draft, plan_run
from hydraloop.processes import slurm
from hydraloop.processes.detach import RUN_LOG, print_commands
from hydraloop.run_files import environment
from hydraloop.sweeps.executors.spawned import command, read_masked, write_masked
from hydraloop.sweeps.slurm import submissions
from hydraloop.sweeps.slurm.submitit_executor import KEY, create_executor, is_local, submit_command
from hydraloop.validate.config import hydra_config


def is_wanted(draft: Draft) -> bool:
    """Return whether the command line asks for it. A config file cannot: it would move a run silently."""
    options = draft.cfg.sweep
    return "sweep.executor" in draft.typed and options.executor == "submitit" and not is_local(options.submitit)


def submit(draft: Draft) -> None:
    """Choose the directory of a run, submit the run, and print what to type next.

    Raises:
        UserError: a parameter or the directory is wrong, or Slurm refuses the job.
    """
    if not draft.cfg.detach:
        problem = "a run that is submitted to Slurm does not stay in the terminal"
        raise UserError(problem, key="sweep.executor", remedy="Add detach=true, or leave out sweep.executor.")
    executor = create_executor(Path(), {"nodes": draft.cfg.distributed.nnodes, **draft.cfg.sweep.submitit})
    with ExitStack() as locks, hydra_config(draft.cfg):
        run_dir = plan_run(draft, locks).run_dir
    executor.folder = run_dir / executor.folder.name
    slurm.start_again(executor.parameters, executor.folder)
    file = run_dir / submissions.FOLDER / f"{time.time_ns()}.json"
    file.parent.mkdir(exist_ok=True)
    ours = ("detach=", "sweep.executor=", "sweep.submitit")
    lines = [line for line in draft.overrides if not line.lstrip("+").startswith(ours)]
    words = [f"{environment.SUBMITTED_RUN}={file}", *command()]
    content = {"directory": str(run_dir), "arrays": list[str]()}
    try:
        variables = write_masked(file, content, overrides=lines)
        content["arrays"] = [submit_command(executor, words, variables, run_dir / RUN_LOG)]
        write_masked(file, content, overrides=lines)
    except Exception as error:  # of submitit, for any answer of sbatch
        raise UserError(f"the run could not be submitted: {error}", key=KEY) from error
    print_commands(run_dir, f"is job {content['arrays'][0]} of Slurm", "status", "logs -f", "stop")
    if json_answers.asked():
        json_answers.write("detach", content)


def received() -> list[str]:
    """Return the overrides of the run that this process is.

    Raises:
        UserError: the secrets of the run are missing.
        OSError: the file of the submission cannot be read.
    """
    content = read_masked(Path(os.environ.pop(environment.SUBMITTED_RUN)))
    lines: list[str] = content["overrides"]
    directory = f"hydra.run.dir={content['directory']}"
    if slurm.was_started_again():
        lines = [*(line for line in lines if not line.startswith("resume=")), "resume=auto"]
    elif any(line.startswith("resume=") and line != "resume=auto" for line in lines):
        return lines
    return [*(line for line in lines if not line.startswith("hydra.run.dir=")), directory]
