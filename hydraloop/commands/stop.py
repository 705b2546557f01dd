"""`hydraloop stop`: let a sweep or a run on this machine, or on Slurm, save and end."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil

from hydraloop.commands.status import show, sweep_in
from hydraloop.files import lock
from hydraloop.files.lock import Holder
from hydraloop.launch.termination import kill_tree
from hydraloop.sweeps.executors import slurm_queue
from hydraloop.sweeps.sweep_directory import SweepDirectory

_POLL = 0.1
"""Seconds between two checks of the processes."""


def run(args: argparse.Namespace) -> int:
    """Send SIGTERM to the process that has locked the directory. Kill the process if an earlier `stop` has done that.

    Waits until the process has ended. Returns the exit code: 1 if something could not be stopped, else 0.

    Raises:
        UserError: the directory holds no sweep and no run.
        PermissionError: it is another user's process.
    """
    path, sweep = args.directory, sweep_in(args.directory)
    is_cancelled = slurm_queue.cancel(path, only_main=True)  # a controller, before the jobs that it starts
    signaled = set[psutil.Process]()
    while (processes := _processes_here(path, sweep)) or any(map(_is_running, signaled)):
        for folder, process in processes.items():
            if process in signaled:
                continue
            signaled.add(process)
            if lock.note_stop(folder) or args.kill:
                kill_tree(process.pid)
            else:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
                print(f"process {process.pid} saves and ends; to kill it, repeat the command", flush=True)
        time.sleep(_POLL)
    is_cancelled = slurm_queue.cancel(path) and is_cancelled
    others = {one.host for one in _holders(path, sweep).values()}
    if not is_cancelled:
        print("error: Slurm does not answer, or has not ended the jobs: squeue --me", file=sys.stderr)
    if others:
        print(f"error: processes on {', '.join(sorted(others))} continue: run the command there, too", file=sys.stderr)
    if others or not is_cancelled:
        return 1
    show(path, sweep)
    return 0


def _holders(path: Path, sweep: SweepDirectory | None) -> dict[Path, Holder]:
    """Return the processes that are to end, by the folder that each of them has locked."""
    holder = lock.holder(path)
    holders = {} if holder is None else {path: holder}
    if sweep is None or (holder is not None and holder.is_here):  # a controller ends its own jobs
        return holders
    for state in sweep.states():
        run_dir = sweep.run_dir(state)
        if state.state == "running" and (holder := lock.holder(run_dir)) is not None:
            holders[run_dir] = holder
    return holders


def _processes_here(path: Path, sweep: SweepDirectory | None) -> dict[Path, psutil.Process]:
    """Return the processes on this machine that are to end, by folder."""
    processes = {}
    for folder, holder in _holders(path, sweep).items():
        with suppress(psutil.NoSuchProcess):
            if holder.is_here:
                processes[folder] = psutil.Process(holder.pid)
    return processes


def _is_running(process: psutil.Process) -> bool:
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
