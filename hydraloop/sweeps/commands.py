"""`python -m hydraloop status|attach|logs|results|stop <directory>`: look at a sweep or a run, or end it. No torch.

These commands read the files of the directory. They need neither the project nor its packages.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
import time
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hydraloop.cli.console import ConsoleHandler, PrintableFormatter, prepare_handlers
from hydraloop.cli.error_reports import Reports
from hydraloop.errors import UserError, printable
from hydraloop.run import lock
from hydraloop.run.checkpoint_files import candidates
from hydraloop.run.directory import checkpoint_folders, holds_run
from hydraloop.run.environment import resume_command, shown
from hydraloop.sweeps import description, states, stopping
from hydraloop.sweeps.detach import CONTROLLER_LOG, RUN_LOG
from hydraloop.sweeps.directory import SweepDirectory
from hydraloop.sweeps.states import JobState

_POLL = 0.3
"""Seconds between two looks at a log."""
_SETTLING = 2.0
"""Seconds for another `stop` to record the jobs that have ended."""
_LISTED = ("running", "interrupted", "failed")
"""States of jobs that `status` lists."""
_MOST = 20
"""Jobs of one state that are listed. More do not fit on a screen; `results` lists all."""


def main(argv: Sequence[str]) -> int:
    """Run a command. Returns the exit code: 0; 1 if something could not be stopped; 2 after a mistake; 130: Ctrl-C."""
    args = _parser().parse_args(argv)
    try:
        if args.command == "logs":
            logs(args.directory, args.job, follow=args.follow)
        elif args.command == "attach":
            attach(args.directory)
        elif args.command == "results":
            results(args.directory, as_json=args.json)
        elif args.command == "stop" and not stop(args.directory, args.wait, kill=args.kill):
            return 1
        else:
            print(printable("\n".join(status(args.directory))))
        sys.stdout.flush()
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (OSError, UserError) as error:
        if isinstance(error, OSError):
            quoted = shlex.quote(str(args.directory))
            remedy = f"See its permissions and the free space: ls -ld {quoted}; df {quoted}"
            error = UserError(f"{error.filename or args.directory}: {error.strerror}", remedy=remedy)
        Reports(with_traceback=False).show(error)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hydraloop", description="Look at a sweep or a run.")
    commands = parser.add_subparsers(dest="command", required=True)
    helps = {
        "status": "print how many jobs are in each state, and which run or have failed",
        "attach": "show a sweep or a run that runs in the background until it ends; Ctrl-C leaves it running",
        "results": "print the results of a sweep, and write results.csv and results.json",
        "logs": "print what a job, a run or a detached controller has printed",
        "stop": "let a sweep or a run save and end; no process of it is left on this machine",
    }
    for name, text in helps.items():
        command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
        command.add_argument("directory", type=Path, help="multirun/<date>/<sweep>, or outputs/<date>/<run>")
        if name == "logs":
            command.add_argument("job", type=int, nargs="?", help="the number of a job; none: the controller's log")
            command.add_argument("-f", "--follow", action="store_true", help="print new lines until it has ended")
        if name == "results":
            command.add_argument("--json", action="store_true", help="print the results as JSON, and write nothing")
        if name == "stop":
            wait = "until what has not ended, and writes no checkpoint, is killed (30)"
            command.add_argument("--wait", type=float, default=30.0, metavar="SECONDS", help=wait)
            command.add_argument("--kill", action="store_true", help="kill at once; so does a second stop")
    return parser


def opened(path: Path) -> SweepDirectory | None:
    """Return the sweep in a directory; None if it holds a run.

    Raises:
        UserError: it holds neither.
    """
    if (path / description.FILENAME).exists():
        return SweepDirectory.load(path.absolute())
    if not holds_run(path):
        raise UserError(
            f"{path} holds no sweep and no run",
            key="directory",
            remedy="Name one: ls -d multirun/*/* outputs/*/*",
        )
    return None


def status(path: Path) -> list[str]:
    """Return what `status` prints."""
    sweep = opened(path)
    if sweep is None:
        state = states.current(path, states.read(path) or JobState(0, "running"), path)
        continues = state.state == "interrupted" and candidates(*checkpoint_folders(path))
        hint = [f"  {shlex.join(resume_command(path))}"] if continues else []
        return [*_described(state, "the run", path), *hint]
    found = sweep.current_states()
    counts = Counter(state.state for state in found)
    lines = [
        f"{shown(path)}: {shlex.join([*sweep.description.command, *sweep.description.overrides])}",
        f"{len(found)} jobs: {', '.join(f'{counts[name]} {name}' for name in counts)}",
    ]
    controllers = sweep.controllers()
    lines += [
        f"controller: process {one.processes[0][0]} on {one.host}, since {one.since}" for one in controllers.values()
    ]
    lines += _hint(sweep, found)
    for name in _LISTED:
        listed = [state for state in found if state.state == name]
        for state in listed[:_MOST]:
            lines += _described(state, sweep.name(state.number), sweep.folder(state.number))
        if len(listed) > _MOST:
            lines.append(f"and {len(listed) - _MOST} other jobs {name}")
    return lines


def _hint(sweep: SweepDirectory, found: list[JobState]) -> list[str]:
    """Return the line that says how a sweep without a controller continues; none if all jobs are over."""
    if all(state.is_over for state in found) or sweep.controllers():
        return []
    return [f"No controller is running. Continue the sweep: {sweep.resume_command()}"]


def _described(state: JobState, name: str, folder: Path) -> list[str]:
    """Return the lines about a job, or about a run."""
    where = f"process {state.pid} on {state.host}" if state.state == "running" else state.error or state.reason or ""
    first, *rest = f"{state.state}: {name}{': ' if where else ''}{where}".splitlines()
    log = _log_of(folder)
    return [first, *rest, *([] if log is None else [f"  {shown(log)}"])]


def attach(path: Path) -> None:
    """Show a sweep until nothing of it runs, then its results; or print the log of a run."""
    sweep = opened(path)
    if sweep is None:
        logs(path, None, follow=True)
        return
    from hydraloop.sweeps.report.display import watch
    from hydraloop.sweeps.report.lines import Lines

    _log_to_terminal()
    watch(Lines(sweep))
    results(path, as_json=False)
    for line in _hint(sweep, sweep.current_states()):
        print(printable(line))


def results(path: Path, *, as_json: bool) -> None:
    """Print the results of a sweep.

    Raises:
        UserError: the directory holds no sweep.
    """
    sweep = SweepDirectory.load(path, key="directory")
    from hydraloop.sweeps.report import results_table
    from hydraloop.sweeps.report.results import as_json as dumped
    from hydraloop.sweeps.report.results import collect

    if as_json:
        print(dumped(sweep, collect(sweep)), end="")
        return
    _log_to_terminal()
    results_table.show(sweep)


def _log_to_terminal() -> None:
    handler = ConsoleHandler()
    handler.setFormatter(PrintableFormatter())
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    prepare_handlers()


def logs(path: Path, number: int | None, *, follow: bool) -> None:
    """Print a log.

    Args:
        number: that of a job; None: the log of a run, or of the sweep's detached controller.
        follow: also print what is added, until the process has ended.
    """
    sweep, folder = opened(path), path
    if sweep is not None and number is not None:
        if not 0 <= number < sweep.description.axes.count:
            raise UserError(
                f"the sweep has no job {number}",
                key="job",
                remedy=f"Name one from 0 to {sweep.description.axes.count - 1}.",
            )
        folder = sweep.folder(number)
    log = _log_of(folder)
    if log is None:
        problem = "the job has not started" if number is not None else "there is no log"
        if sweep is not None and number is None:
            problem = "the sweep was not detached, so its controller has printed to its terminal"
        status = shlex.join(["python", "-m", "hydraloop", "status", str(path)])
        raise UserError(problem, key="logs", remedy=f"See which jobs there are: {status}")
    alive = sweep.controllers if sweep is not None and number is None else partial(lock.holder, folder)
    with log.open("rb") as file:
        while True:
            is_over = not follow or not alive()
            while line := file.readline(1 << 16):  # after the end was seen, so that nothing is missed
                text = line.decode(errors="replace").replace("\r\n", "\n").replace("\r", "\n")  # of progress bars
                sys.stdout.buffer.write(printable(text).encode())
            sys.stdout.buffer.flush()
            if is_over:
                return
            time.sleep(_POLL)


def stop(path: Path, seconds: float, *, kill: bool) -> bool:
    """End a sweep or a run, print what has ended, and return whether nothing of it is left.

    Processes that an earlier `stop` has told to end are killed.
    """
    sweep, others = opened(path), set[str]()

    def holders() -> dict[Path, lock.Holder]:
        controllers = {} if sweep is None else sweep.controllers()
        held = {path / lock.CONTROLLERS / name: one for name, one in controllers.items()}
        if not any(one.is_here for one in held.values()):  # a controller on this machine tells its own jobs
            pids = {path: None} if sweep is None else {sweep.folder(job.number): job.pid for job in _running(sweep)}
            found = {folder: lock.holder(folder) for folder in pids}
            # Only the lock of the job's own process counts: a second `stop` holds it while it records the end of a job.
            held |= {
                at: one for at, one in found.items() if one is not None and pids[at] in (None, one.processes[0][0])
            }
        others.update(one.host for one in held.values() if not one.is_here)
        return {folder: one for folder, one in held.items() if one.alive}

    def find() -> list[int]:
        # The first process of a lock tells rank 0, if rank 0 is another process.
        return [one.alive[0][0] for one in holders().values()]

    def waits() -> None:
        command = shlex.join(["python", "-m", "hydraloop", "stop", "--kill", shown(path)])
        print(f"waiting for a checkpoint that is being written; kill the run: {command}", flush=True)

    was_told = [lock.note_stop(folder) for folder in holders()]
    ended, killed, left = stopping.end(find, seconds, waits, kill=kill or any(was_told))
    print(f"processes ended: {ended}" + (f", killed: {killed}" if killed else ""))
    if left:
        pids = ",".join(map(str, left))
        print(f"error: these processes could not be ended: ps -o pid,user,stat,args -p {pids}", file=sys.stderr)
    if others:
        print(f"error: processes on {', '.join(sorted(others))} continue: run the command there, too", file=sys.stderr)
    if sweep is not None:
        for number in range(sweep.description.axes.count):
            (sweep.folder(number) / states.REQUEST).unlink(missing_ok=True)  # of a job that waits in Slurm's queue
        until = time.monotonic() + _SETTLING
        while [job for job in _running(sweep) if sweep.settle(job.number, None).state == "running"]:
            if others or left or time.monotonic() > until:
                break
            time.sleep(_POLL)
    return not others and not left


def _running(sweep: SweepDirectory) -> list[JobState]:
    return [state for state in sweep.states() if state.state == "running"]


def _log_of(folder: Path) -> Path | None:
    """Return the log of a job, of a controller, or of a run."""
    logs = (folder / name for name in (states.LOG, CONTROLLER_LOG, RUN_LOG, "train.log"))
    return next((log for log in logs if log.exists()), None)
