"""`python -m hydraloop stop`: let a sweep or a run save and end. No process of it is left on this machine."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from hydraloop.commands import status
from hydraloop.commands.status import sweep_in
from hydraloop.run_files import lock
from hydraloop.run_files.environment import shown
from hydraloop.run_files.lock import Holder
from hydraloop.sweeps import stopping
from hydraloop.sweeps.slurm import submissions
from hydraloop.sweeps.sweep_directory import SweepDirectory


def run(args: argparse.Namespace) -> int:
    """End the processes, and print what has ended. Returns the exit code: 1 if something could not be stopped, else 0.

    Processes that an earlier `stop` has told to end are killed.

    Raises:
        UserError: the directory holds no sweep and no run.
    """
    path, sweep = args.directory, sweep_in(args.directory)

    def find() -> list[int]:
        return [one.pid for one in _holders(path, sweep).values() if one.is_here]

    def waits() -> None:
        command = shlex.join(["python", "-m", "hydraloop", "stop", "--kill", shown(path)])
        print(f"waiting for a checkpoint that is being written; kill the run: {command}", flush=True)

    is_cancelled = submissions.cancel(path, only_main=True)  # a controller, before the jobs that it starts
    were_told = [lock.note_stop(folder) for folder, one in _holders(path, sweep).items() if one.is_here]
    ended, killed, left = stopping.end(find, args.wait, waits, kill=args.kill or any(were_told))
    is_cancelled = submissions.cancel(path) and is_cancelled
    others = {one.host for one in _holders(path, sweep).values() if not one.is_here}
    print(f"processes ended: {ended}" + (f", killed: {killed}" if killed else ""))
    if left:
        pids = ",".join(map(str, left))
        print(f"error: these processes could not be ended: ps -o pid,user,stat,args -p {pids}", file=sys.stderr)
    if not is_cancelled:
        print("error: Slurm does not answer, or has not ended the jobs: squeue --me", file=sys.stderr)
    if others:
        print(f"error: processes on {', '.join(sorted(others))} continue: run the command there, too", file=sys.stderr)
    return 1 if others or left or not is_cancelled else status.run(args)


def _holders(path: Path, sweep: SweepDirectory | None) -> dict[Path, Holder]:
    """Return the processes that are to be told, by the folder that each of them has locked."""
    holder = lock.holder(path)
    held = {} if holder is None else {path: holder}
    if sweep is None or (holder is not None and holder.is_here):  # a controller tells its own jobs
        return held
    for state in sweep.states():
        run_dir = sweep.run_dir(state)
        if state.state == "running" and (holder := lock.holder(run_dir)) is not None:
            held[run_dir] = holder
    return held
