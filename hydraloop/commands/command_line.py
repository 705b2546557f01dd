"""The command line: choose what it asks for, report a mistake, and exit. Only this file reads sys.argv and exits.

Exit codes: 0 done; 1 a run failed, or something was not possible; 2 a mistake in the command line or the config; 75 the
run was preempted and has saved. A command that a signal ends without that: 130 (Ctrl-C), 143 (SIGTERM), 129 (SIGHUP).
"""

from __future__ import annotations

import errno
import gc
import importlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from hydraloop.commands import parser
from hydraloop.config import arguments
from hydraloop.errors import UserError
from hydraloop.files import environment
from hydraloop.files.error_reports import Reports
from hydraloop.files.terminal import print_to, replace_unencodable, show
from hydraloop.importing import deferred, in_one_line, uncollected
from hydraloop.launch import torchrun
from hydraloop.launch.exit import exit_code
from hydraloop.launch.termination import terminable
from hydraloop.safety.allowlist import ALLOWLIST, IN_MAIN

if TYPE_CHECKING:
    from hydraloop.commands.train import TrainCommand


def main(
    *,
    config_path: str = "conf",
    config_name: str = "config",
    trusted: Sequence[str] = (),
    folder: Path | None = None,
) -> None:
    """Train, or do what the command line asks for, and exit with the code that says how it ended (see this module).

    Args:
        config_path: the folder with config files, relative to the calling file.
        config_name: the primary config in it, without `.yaml`.
        trusted: packages whose classes a config may name in `_target_`, in addition to the allowlist's own.
        folder: used instead of the calling file's folder. A config may name the Python files in it.
    """
    folder = folder or Path(sys._getframe(1).f_code.co_filename).resolve().parent
    ALLOWLIST.trust_folder(folder)
    ALLOWLIST.trust(trusted)
    ALLOWLIST.advice = ALLOWLIST.advice or IN_MAIN
    with in_one_line():
        _exit(_run(folder, folder / config_path, config_name))


def without_project() -> None:
    """Do what `hydraloop …` asks for, without the code of a project. Only hydraloop and torch are trusted."""
    ALLOWLIST.advice = IN_MAIN._replace(command=shlex.join(["python", "train.py", *sys.argv[1:]]))
    name = next(iter(sys.argv[1:]), "")
    asks = not {"-h", "--help"}.isdisjoint(sys.argv)
    with in_one_line():
        if name in parser.COMMANDS and name not in parser.OF_PROJECTS and not asks:
            replace_unencodable()
            code = view(sys.argv[1:])
        else:
            code = _run(None, None, "hydraloop/project")
        _exit(code)


def _exit(code: int) -> None:
    if code:
        sys.exit(code)


def _run(project: Path | None, configs: Path | None, name: str) -> int:
    """Run the command line, report its error, and return the exit code.

    Args:
        project: the folder whose Python files a config may name; None: no project is trusted.
        configs: the folder with config files; None: there is none.
        name: of the primary config.
    """
    replace_unencodable()
    gc.freeze()  # the collector would go through all imported objects many times: a fifth of a dry run
    if torchrun.is_several():
        torchrun.keep_quiet()
    if torchrun.rank() > 0:
        print_to(Path(os.devnull))
    if torchrun.is_launched():
        torchrun.end_with_launcher()
    with deferred():
        from hydraloop.commands.train import NO_CONFIGS, TrainCommand  # 150 ms, which other commands do without
        from hydraloop.launch.other_ranks import Peers

    peers = Peers()
    reports = Reports(os.environ.get("HYDRA_FULL_ERROR") == "1", as_json="--json" in sys.argv)
    try:
        with terminable(), _explaining_long_names(reports):
            peers.check_restart()
            code = _choose(project, TrainCommand(configs or NO_CONFIGS, name, reports, peers))
    except SystemExit:  # the end of a sweep; or argparse has printed the version
        raise
    except BaseException as error:
        peers.report_error(error)
        code = exit_code(error, of_run=error in reports.shown)
        if torchrun.reports():
            reports.show(error)
        reports.debug(error)
    if torchrun.is_several():
        peers.exit(code)
    return code


@contextmanager
def _explaining_long_names(reports: Reports) -> Iterator[None]:
    """Let a typed name that is too long for a file be a mistake. It may be of a group, a config, a run or a hook."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.ENAMETOOLONG or error in reports.shown:
            raise
        raise UserError(f"{error.filename}: {error.strerror}", remedy="Type a shorter name.") from error


def _choose(project: Path | None, train: TrainCommand) -> int:
    """Run the command that is typed. Without one, train, or show what the flags ask for. Return the exit code."""
    argv, job = sys.argv[1:], None
    if environment.is_received():
        from hydraloop.sweeps.job import arguments_of_process

        argv = arguments_of_process(argv)
    if torchrun.is_ours():
        argv, job = torchrun.own_arguments(argv)
    args = arguments.read(argv)
    environment.set_command([*environment.script(), *args.config_flags])
    others = args.help or bool(args.unknown)
    found = None if job is not None or args.shell_completion else parser.find(args.overrides, others=others)
    if found is None and project is not None:
        return train.run(args, argv, job)
    if args.help:
        show(parser.listing() if found is None else parser.help_of(found.name))
        return 0
    if found is None:
        raise UserError("hydraloop trains nothing itself", remedy=f"Type python train.py …\n{parser.listing()}")
    if found.name not in parser.OF_PROJECTS:
        words = list(argv)
        words.remove(found.name)
        return view([found.name, *words])
    if project is None and found.name in ("resume", "check"):
        remedy = f"The project's script does that: {shlex.join(['python', 'train.py', *argv])}"
        raise UserError("it runs the code of a project", key=found.name, remedy=remedy)
    if found.name == "check":
        args.overrides = [*found.before, *found.words]
        return train.check(args, argv)
    typed = parser.on_run(found, args)
    if found.name == "resume":
        environment.set_command([*environment.script(), typed.name, str(typed.run)])
        return train.resume(args, argv, typed)
    with uncollected():
        command = importlib.import_module(f"hydraloop.commands.{found.name}")  # imports torch
    command.run(typed, argv, train.peers)
    return 0


def view(argv: Sequence[str]) -> int:
    """Run a command that runs no code of a project, report its mistake, and return the exit code.

    Args:
        argv: the name of the command, and its arguments.
    """
    reports = Reports(with_traceback=False, as_json="--json" in argv)
    try:
        args = parser.viewed(argv[0], argv[1:])
        with deferred():
            module = importlib.import_module(f"hydraloop.commands.{args.command}")
        code: int = module.run(args)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, UserError) as error:
        reports.show(error if isinstance(error, UserError) else UserError(str(error)))
        return 2
    except KeyboardInterrupt:
        return 130
