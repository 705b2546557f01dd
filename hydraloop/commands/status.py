"""`hydraloop status`: how a sweep or a run is doing, from the files of its directory.

Neither this command nor `attach`, `results` and `stop` need the project and its packages, or import torch.
"""

from __future__ import annotations

import argparse
import re
import shlex
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from hydraloop.commands.runs import described, result_from_records
from hydraloop.errors import UserError, missing_path, printable
from hydraloop.files import lock
from hydraloop.files.checkpoint_files import candidates
from hydraloop.files.environment import of_project, shown
from hydraloop.files.result import Result
from hydraloop.files.run_directory import checkpoint_folders, holds_run
from hydraloop.files.terminal import number, print_json
from hydraloop.launch.detach import CONTROLLER_LOG, RUN_LOG
from hydraloop.sweeps import job_states, sweep_directory
from hydraloop.sweeps.executors import slurm_queue
from hydraloop.sweeps.executors.slurm_queue import current_states
from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.progress import Progress, RunningJob
from hydraloop.sweeps.sweep_directory import SweepDirectory

_LISTED = ("running", "interrupted", "failed", "pruned")
"""States of jobs that are listed."""
_MOST = 20
"""Lines about jobs of one state. More do not fit on a screen; `results` lists all jobs."""
_WIDE = 100
"""Characters of an override, and of the error of several jobs, that are shown in full."""


def run(args: argparse.Namespace) -> int:
    """Print the state. Returns the exit code 0.

    Raises:
        UserError: the directory holds no sweep and no run.
    """
    sweep = sweep_in(args.directory)
    if args.json:
        print_json({"directory": args.directory, **_for_programs(args.directory, sweep)})
        return 0
    show(args.directory, sweep)
    return 0


def show(path: Path, sweep: SweepDirectory | None) -> None:
    """Print the state of a sweep, or of the run in a directory."""
    print(printable("\n".join(_of_run(path) if sweep is None else _of_sweep(sweep))))


def _for_programs(path: Path, sweep: SweepDirectory | None) -> dict[str, Any]:
    if sweep is None:
        state = state_of_run(path)
        running = RunningJob(state)
        running.read_records(path)
        run = described(path) | {"status": state.state, "reason": state.reason, "iteration": running.iteration}
        return {"run": run, "log": log_of(path)}
    jobs = current_states(sweep)
    return {
        "jobs": [{**asdict(job), "log": log_of(sweep.folder(job.number))} for job in jobs],
        "count": sweep.description.jobs.count,
        "counts": Counter(job.state for job in jobs),
        "controller": None if (held := sweep.holder()) is None else asdict(held),
        "typed": [*sweep.description.command, *sweep.description.overrides],
    }


def sweep_in(path: Path) -> SweepDirectory | None:
    """Return the sweep in a directory; None if it holds a run.

    Raises:
        UserError: it holds neither.
    """
    if (path / sweep_directory.FILENAME).exists():
        return SweepDirectory.load(path)
    if not holds_run(path) and lock.holder(path) is None and not slurm_queue.has_jobs(path):
        remedy = missing_path(path, "Name one: ls -d multirun/*/* outputs/*/*")
        raise UserError(f"{path} holds no sweep and no run", key="directory", remedy=remedy)
    return None


def state_of_run(path: Path) -> JobState:
    """Return the state of a run, which may be the job of a sweep, or wait in Slurm's queue."""
    if (job := _state_of_job(path.resolve())) is not None:
        return job
    state = job_states.current(JobState(0, "running"), path)
    queue = slurm_queue.jobs(path) if state.state == "interrupted" else {}
    if queue is None:
        return replace(state, reason=f"{state.reason}, if it does not wait in Slurm's queue: Slurm does not answer")
    if queue:  # Slurm will start the run
        return replace(state, state="queued", reason=f"job {queue[slurm_queue.MAIN].id} of Slurm")
    return state


def _state_of_job(path: Path) -> JobState | None:
    """Return the state of the job whose run directory this is, as its sweep shows it; None if it is not a job.

    A job whose directory is not locked may wait in a queue, or for the end of its ranks. Only its controller knows.
    """
    for folder in path.parents:
        with suppress(UserError):
            sweep = SweepDirectory.load(folder)
            return next((state for state in current_states(sweep) if sweep.run_dir(state) == path), None)
    return None


def _of_run(path: Path) -> list[str]:
    state = state_of_run(path)
    continues = state.state in ("interrupted", "paused") and candidates(*checkpoint_folders(path))
    command = [f"  {shlex.join(of_project('resume', path))}"] if continues else []
    running = RunningJob(state) if state.state == "running" else None
    if running is not None:
        running.read_records(path)
    best = _best(path) if running is None else []  # else the result is that of an earlier attempt
    return [*_described(state, "the run", path, path, running), *best, *command]


def _best(path: Path) -> list[str]:
    """Return a line about the best validation; about the last one, if it is not known which values are good."""
    result = Result.read(path) or result_from_records(path)
    goal = result.objective
    label = "validation" if goal is None or goal.rule is None else "best"
    return [] if goal is None else [f"{label}: {goal.metric} {number(goal.value)}{result.note}"]


def _of_sweep(sweep: SweepDirectory) -> list[str]:
    states = current_states(sweep)
    counts = Counter(state.state for state in states)
    lines = [
        f"{shown(sweep.path)}: {' '.join(map(_cut, [*sweep.description.command, *sweep.description.overrides]))}",
        f"{sweep.description.jobs.title(len(states))}: {', '.join(f'{counts[name]:,} {name}' for name in counts)}",
    ]
    if (held := sweep.holder()) is not None:
        lines.append(f"controller: process {held.pid} on {held.host}, since {held.since}")
    lines += [*slurm_queue.lines(sweep.path), *continue_hint(sweep, states)]
    progress = Progress.of(sweep, states)
    progress.read_records()
    lines += progress.best_lines()
    for name in _LISTED:
        groups = _groups(state for state in states if state.state == name)
        for group in groups[:_MOST]:
            first = group[0]
            who = sweep.name(first.number) if len(group) == 1 else f"{len(group):,} jobs"
            if len(group) > 1 and first.error is not None and len(first.error) > _WIDE:  # its numbers differ
                first = replace(first, error=first.error.partition(". ")[0])
            running = progress.running.get(first.number)
            lines += _described(first, who, sweep.folder(first.number), sweep.run_dir(first), running)
        if others := sum(map(len, groups[_MOST:])):
            lines.append(f"and {others:,} other jobs {name}")
    return lines


def _cut(word: str) -> str:
    """Return a word of the command line for reading, without the middle of a long one."""
    word = shlex.quote(word)
    return word if len(word) <= _WIDE else f"{word[:40]}…{word[-10:]}"


def _groups(states: Iterable[JobState]) -> list[list[JobState]]:
    """Return jobs of one state with those together that have the same reason, or the same error but for its numbers.

    The largest group is first. A running job is alone.
    """
    groups: dict[object, list[JobState]] = {}
    for state in states:
        text = state.reason if state.error is None else re.sub(r"0x[0-9a-f]+|\d+", "0", state.error)
        groups.setdefault(state.number if state.state == "running" else text, []).append(state)
    return sorted(groups.values(), key=len, reverse=True)


def continue_hint(sweep: SweepDirectory, states: list[JobState]) -> list[str]:
    """Return the line that says how a sweep without a controller continues; none if all jobs are over."""
    if all(state.is_over for state in states) or sweep.holder() is not None:
        return []
    queue = slurm_queue.jobs(sweep.path)
    if queue is None or slurm_queue.MAIN in queue:  # the controller may wait for Slurm
        return []
    return [f"No controller is running. Continue the sweep: {sweep.resume_command(states)}"]


def _described(state: JobState, name: str, folder: Path, run_dir: Path, running: RunningJob | None) -> list[str]:
    """Return the lines about a job, or about a run."""
    where = state.error or state.reason or ""
    if running is not None and (held := lock.holder(run_dir)) is not None:
        where = ", ".join([f"process {held.pid} on {held.host}", *running.told()])
    first, *rest = f"{state.state}: {name}{': ' if where else ''}{where}".splitlines()
    log = None if state.state == "pruned" else log_of(folder)
    return [first, *rest, *([] if log is None else [f"  {shown(log)}"])]


def log_of(folder: Path) -> Path | None:
    """Return the log of a job, of a controller, or of a run; None if there is no log."""
    logs = (folder / name for name in (job_states.LOG, CONTROLLER_LOG, RUN_LOG, "train.log"))
    return next((log for log in logs if log.exists()), None)
