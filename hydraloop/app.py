"""`hydraloop.main()`: command line -> validated config -> one run, or a sweep. Only this file reads sys.argv.

Mistakes that can be found without torch are found before anything is written. Modules that only a run needs are
imported when it starts, so that --help and --dry-run are fast.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop.cli import arguments, resume_command
from hydraloop.cli.compose import opened
from hydraloop.cli.error_reports import Reports
from hydraloop.cli.help import show, show_help, show_plan
from hydraloop.commands.parser import COMMANDS, listed_names
from hydraloop.early_interrupts import in_one_line
from hydraloop.errors import Terminated, UserError
from hydraloop.plan import Draft
from hydraloop.processes import private, torchrun
from hydraloop.processes.checks import check_debugger
from hydraloop.processes.failure import Requeue
from hydraloop.processes.peers import Peers
from hydraloop.processes.termination_signals import terminable
from hydraloop.run_files import environment
from hydraloop.run_files.config_yaml import remember_config
from hydraloop.run_files.output import print_to, replace_unencodable
from hydraloop.safety.allowlist import ALLOWLIST, IN_MAIN
from hydraloop.sweeps import planning
from hydraloop.sweeps.planning import SweepDraft
from hydraloop.sweeps.slurm import submitted

if TYPE_CHECKING:
    from hydraloop.processes.run_starter import RunStarter


def main(
    *,
    config_path: str = "conf",
    config_name: str = "config",
    trusted: Sequence[str] = (),
    folder: Path | None = None,
    hydra_sections: bool = False,
) -> None:
    """Train, or show what the command line asks for, and exit.

    Exit codes: 0 done, 1 a run failed, 2 a mistake in the command line; 75 the run was preempted and has saved, 130
    after Ctrl-C; ended without that by Ctrl-C 130, SIGTERM 143, SIGHUP 129.

    Args:
        config_path: the folder with config files, relative to the calling file.
        config_name: the primary config in it, without `.yaml`.
        trusted: packages whose classes a config may name in `_target_`, in addition to the allowlist's own.
        folder: used instead of the calling file's folder. A config may name the Python files in it.
        hydra_sections: whether config files may set all options of Hydra. By default, the others must be typed.
    """
    with in_one_line():
        replace_unencodable()
        folder = folder or Path(sys._getframe(1).f_code.co_filename).resolve().parent
        gc.freeze()  # the collector would go through all imported objects many times: a fifth of a dry run
        ALLOWLIST.trust_folder(folder)
        ALLOWLIST.trust(trusted)
        ALLOWLIST.hydra_sections = hydra_sections
        ALLOWLIST.advice = ALLOWLIST.advice or IN_MAIN
        if torchrun.is_several():
            torchrun.keep_quiet()
        if torchrun.rank() > 0:
            print_to(Path(os.devnull))
        if torchrun.is_launched():
            torchrun.end_with_launcher()
        peers = Peers()
        reports = Reports(os.environ.get("HYDRA_FULL_ERROR") == "1", as_json="--json" in sys.argv)
        code = _run(_App(folder, folder / config_path, config_name, reports, peers))
        if torchrun.is_several():
            peers.leave(code)
        if code:
            sys.exit(code)


def _run(app: _App) -> int:
    try:
        with terminable():
            app.peers.begin()
            app.run(sys.argv[1:])
    except SystemExit:  # the end of a sweep; or argparse has printed the version
        raise
    except BaseException as error:
        app.peers.failed(error)
        code = _exit_code(error, app.reports)
        if torchrun.reports():
            app.reports.show(error)
        app.reports.debug(error)
        return code
    return 0


def _complete(argv: Sequence[str], folder: Path, name: str) -> None:
    """Let Hydra answer a shell at a press of Tab. Nothing is completed after the name of a command."""
    if COMMANDS.keys().isdisjoint(os.environ.get("COMP_LINE", "").split()):
        from hydraloop.cli import hydra_run

        with redirect_stderr(io.StringIO()), suppress(Exception, SystemExit):  # a mistake in it
            hydra_run.show(argv, folder, name)


def _exit_code(error: BaseException, reports: Reports) -> int:
    if isinstance(error, Requeue):
        return 0 if torchrun.is_launched() else error.code  # a launcher would restart the ranks
    if isinstance(error, KeyboardInterrupt):
        return 128 + (error.number if isinstance(error, Terminated) else signal.SIGINT)
    return 2 if isinstance(error, UserError) and error not in reports.shown else 1


@dataclass(frozen=True)
class _App:
    """One command line."""

    project: Path
    """The folder whose Python files a config may name."""
    configs: Path
    name: str
    """Of the primary config."""
    reports: Reports
    peers: Peers
    """The other ranks, if this process is one of several."""

    def run(self, argv: Sequence[str]) -> None:
        """Show what the arguments ask for, or train once, or in a sweep."""
        if environment.is_received():
            from hydraloop.sweeps import received

            argv = received.arguments(argv)
        job: Mapping[str, Any] | None = None
        if torchrun.is_ours():
            argv, job = private.of_rank(argv)
        args = arguments.read(argv)
        environment.set_command([*environment.script(), *args.config_flags])
        if args.overrides[:1] == [resume_command.NAME]:
            return self._resume(args, argv)
        name = args.config_name or self.name
        folder = self.configs if args.config_path is None else self.configs.parent / args.config_path
        if args.shell_completion:
            return _complete([*arguments.flags(argv, args, folder), *args.overrides], folder, name)
        with opened(folder, name, args.config_dir) as composer:
            if environment.is_received():
                received.run_job(composer, self._starter())
            if job is not None:
                from hydraloop.sweeps.job import train_rank

                return train_rank(job, args.overrides, composer, self._starter())
            if args.help:
                return show_help(args, composer, self.project, listed_names())
            with redirect_stderr(io.StringIO()) if torchrun.is_ours() else nullcontext():  # it was said already
                draft = planning.check_command(args, composer)
            overrides = draft.overrides
            remember_config(draft.cfg)
            if args.dry_run:
                return show_plan(draft, as_json=args.json)
            if args.json:
                raise arguments.no_json()
            if args.cfg is None:
                if args.pdb:
                    self._use_debugger(draft)
                if not isinstance(draft, SweepDraft):
                    if submitted.is_run(draft) and not torchrun.is_several():
                        return submitted.submit_run(draft)
                    return self._starter().run(draft, name, argv)
                from hydraloop.sweeps import run_sweep

                run_sweep.run(draft, self._starter(), name)
        from hydraloop.cli import hydra_run

        flags = arguments.flags(argv, args, folder)  # Hydra opens a composer itself
        return hydra_run.show([*flags, *overrides], folder, name)

    def _resume(self, args: argparse.Namespace, argv: Sequence[str]) -> None:
        """Continue a run with its saved config, or show its plan."""
        if args.help:
            return show(f"{resume_command.HELP}\n\n{listed_names()}")
        environment.set_command([*environment.script(), *args.overrides[:2]])
        with opened(self.project, resume_command.BASE) as composer:
            draft = resume_command.check_resume(args, composer)
            if args.dry_run:
                return show_plan(draft, as_json=args.json)
            if args.json:
                raise arguments.no_json()
            if args.pdb:
                self._use_debugger(draft)
            return self._starter().run(draft, resume_command.BASE, argv)

    def _use_debugger(self, draft: Draft) -> None:
        """Open the debugger after an error of the run, or refuse to."""
        check_debugger(draft.cfg, is_sweep=isinstance(draft, SweepDraft))
        self.reports.with_debugger = True

    def _starter(self) -> RunStarter:
        from hydraloop.processes.run_starter import RunStarter

        return RunStarter(self.reports, self.peers)
