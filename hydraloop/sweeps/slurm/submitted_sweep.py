"""A sweep that is submitted to Slurm as arrays: `python train.py -m … sweep.executor=submitit detach=true`."""

from __future__ import annotations

import math
import sys
from typing import NoReturn

from hydraloop import json_answers
from hydraloop.processes.detach import print_commands
from hydraloop.sweeps.planning import SweepDraft
from hydraloop.sweeps.slurm import arrays
from hydraloop.sweeps.slurm.submitit_executor import DELAY
from hydraloop.sweeps.sweep_directory import SweepDirectory


def submit(directory: SweepDirectory, draft: SweepDraft, at_a_time: int) -> NoReturn:
    """Submit arrays that run the sweep, print what to type next, and exit."""
    retries = ("failed",) if draft.options.retry_failed else ()
    over = sum(state.is_over and state.state not in retries for state in directory.states())
    left = directory.description.jobs.count - over
    tasks = left if draft.jobs.search is None else min(left, at_a_time)
    ids = arrays.submit(directory.path, draft.overrides, draft.options.submitit, tasks, at_a_time)
    how = f"has {left:,} jobs to run, submitted to Slurm as array {', '.join(ids)}"
    print_commands(directory.path, how, "status", "attach", "stop")
    if json_answers.asked():
        json_answers.write("detach", {"directory": directory.path, "arrays": ids})
    sys.exit(0)


def limit(draft: SweepDraft) -> float:
    """Return the seconds of a task in which jobs begin. A search has no task for each job: a job may begin late."""
    if draft.jobs.search is not None:
        return math.inf
    options = draft.options.submitit  # Slurm signals that the time limit is near
    return 60.0 * float(options.timeout_min) - float(options.get("slurm_signal_delay_s", DELAY))
