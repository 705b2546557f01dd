"""The queue of Slurm: the jobs of a directory, and their states, from any machine that has Slurm's commands."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from hydraloop.files.atomic import read_json
from hydraloop.launch import slurm
from hydraloop.sweeps import job_states
from hydraloop.sweeps.job_states import JobState
from hydraloop.sweeps.sweep_directory import FILENAME, SweepDirectory

FOLDER = ".submitit"
"""In the directory: scripts and logs of submitit, and exit codes."""
MAIN = "main"
"""Stands for job and attempt in the name of a job that runs the command itself; its folder in `FOLDER`."""
COMMAND = "command.json"
"""In that folder: the id of the directory, and the overrides of the command."""
_ENDING = 60.0
"""Seconds that jobs may take to end: Slurm kills them `KillWait` after a signal, 30 s by default."""
_POLL = 0.5
"""Seconds between two questions to Slurm."""


def name_of(options: Mapping[str, Any], uid: str, what: str) -> str:
    """Return the name of a job in Slurm: `hydraloop-<uid>-<job>.<attempt>`, or `hydraloop-<uid>-main`."""
    return f"{options.get('name', 'hydraloop')}-{uid}-{what}"


def has_jobs(path: Path) -> bool:
    """Return whether jobs of a directory were submitted."""
    return (path / FOLDER).exists()


def jobs(path: Path) -> dict[str, slurm.Job] | None:
    """Return the jobs of a directory that have not ended, by the ends of their names; None if Slurm does not answer."""
    if not has_jobs(path):
        return {}
    queue = slurm.queue()
    if queue is None:
        return None
    mark = f"-{_uid(path)}-"
    return {job.name.rpartition(mark)[2]: job for job in queue.values() if mark in job.name and not job.has_ended}


def _uid(path: Path) -> str:
    """Return the id of a sweep, or of a run that was submitted."""
    for file in (path / FILENAME, path / FOLDER / MAIN / COMMAND):
        with suppress(OSError, ValueError, KeyError):
            return str(read_json(file)["uid"])
    return "unknown"


def cancel(path: Path, *, only_main: bool = False) -> bool:
    """Cancel the jobs of a directory, which save, and wait for their end. Return whether Slurm says that all are gone.

    Args:
        only_main: the job that runs the command itself, and submits others.
    """
    until = time.monotonic() + _ENDING
    cancelled = set[str]()
    while True:
        queue = jobs(path)
        running = {job.id for what, job in (queue or {}).items() if what == MAIN or not only_main}
        if queue is not None and not running:
            return True
        if time.monotonic() > until:
            return False
        new = running - cancelled  # a second signal would end a run that saves
        if new and slurm.cancel(*sorted(new)):
            cancelled |= new
        time.sleep(_POLL)


def lines(path: Path) -> Iterator[str]:
    """Yield the line of `status` about the jobs in Slurm's queue."""
    if not has_jobs(path):
        return
    queue = jobs(path)
    counts = Counter(f"{job.state} ({job.reason})".removesuffix(" (None)") for job in (queue or {}).values())
    shown = ", ".join(f"{count} {state}" for state, count in sorted(counts.items())) or "none"
    yield f"Slurm: {'it does not answer' if queue is None else f'your jobs in the queue: {shown}'}"


def current_states(directory: SweepDirectory) -> list[JobState]:
    """Return the states of all jobs. Without a controller, one whose process has ended is not `running`.

    A job that may wait in Slurm's queue is: no answer of Slurm does not mean that it is not there.
    """
    states = directory.states()
    if not any(state.state == "running" for state in states) or directory.holder() is not None:
        return states
    queue = jobs(directory.path)
    queued = None if queue is None else {what.partition(".")[0] for what in queue}
    return [
        state
        if state.state != "running" or queued is None or str(state.number) in queued
        else job_states.current(state, directory.run_dir(state))
        for state in states
    ]
