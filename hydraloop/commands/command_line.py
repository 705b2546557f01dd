"""`hydraloop.main()`: command line -> validated config -> one run, or a sweep. Only this file reads sys.argv.

Mistakes that can be found without torch are found before anything is written. Modules that only a run needs are
imported when it starts, so that --help and --dry-run are fast.
"""

from __future__ import annotations

import argparse
import gc
import io
import os
import shlex
import signal
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop import schemas
from hydraloop.commands import dispatch, parser, resume
from hydraloop.config import arguments, checks, saved_config
from hydraloop.config.checks import Draft
from hydraloop.config.compose import Composer, opened
from hydraloop.config.help import show, show_config, show_help, show_plan
from hydraloop.errors import Terminated, UserError
from hydraloop.files import environment
from hydraloop.files.config_yaml import remember_config
from hydraloop.files.error_reports import Reports
from hydraloop.files.run_directory import RECORDS
from hydraloop.files.terminal import print_to, replace_unencodable
from hydraloop.importing import in_one_line, uncollected
from hydraloop.launch import private, torchrun
from hydraloop.launch.checks import check_debugger, check_options
from hydraloop.launch.failure import Requeue
from hydraloop.launch.peers import Peers
from hydraloop.launch.processes import terminable
from hydraloop.safety.allowlist import ALLOWLIST, IN_MAIN, in_script

if TYPE_CHECKING:
    from hydraloop.launch.run_starter import RunStarter


_SCHEMAS = Path(schemas.__file__).parent
"""A folder without config files."""


def main(
    *,
    config_path: str = "conf",
    config_name: str = "config",
    trusted: Sequence[str] = (),
    folder: Path | None = None,
) -> None:
    """Train, or show what the command line asks for, and exit.

    Exit codes: 0 done, 1 a run failed, 2 a mistake in the command line; 75 the run was preempted and has saved, 130
    after Ctrl-C; ended without that by Ctrl-C 130, SIGTERM 143, SIGHUP 129.

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
    _start(folder, folder / config_path, config_name)


def without_project() -> None:
    """Run a command as `main` does, without the code of a project. Only hydraloop and torch are trusted."""
    ALLOWLIST.advice = in_script(shlex.join(["python", "train.py", *sys.argv[1:]]))
    _start(None, _SCHEMAS, "hydraloop/project")


def _start(project: Path | None, configs: Path, name: str) -> None:
    with in_one_line():
        replace_unencodable()
        gc.freeze()  # the collector would go through all imported objects many times: a fifth of a dry run
        if torchrun.is_several():
            torchrun.keep_quiet()
        if torchrun.rank() > 0:
            print_to(Path(os.devnull))
        if torchrun.is_launched():
            torchrun.end_with_launcher()
        peers = Peers()
        reports = Reports(os.environ.get("HYDRA_FULL_ERROR") == "1", as_json="--json" in sys.argv)
        code = _run(_App(project, configs, name, reports, peers))
        if torchrun.is_several():
            peers.leave(code)
        if code:
            sys.exit(code)


def _run(app: _App) -> int:
    try:
        with terminable():
            app.peers.begin()
            return app.run(sys.argv[1:])
    except SystemExit:  # the end of a sweep; or argparse has printed the version
        raise
    except BaseException as error:
        app.peers.failed(error)
        code = _exit_code(error, app.reports)
        if torchrun.reports():
            app.reports.show(error)
        app.reports.debug(error)
        return code


def check_command(args: argparse.Namespace, composer: Composer) -> Draft:
    """Compose and check the config of the run, or each value of each axis of the sweep.

    Raises:
        UserError: a mistake in the overrides or in the config files.
    """
    draft = checks.read(args, composer)
    if draft is None:
        from hydraloop.sweeps import check_sweep

        return check_sweep.check(args, composer)
    check_options(draft.cfg)
    return draft


def _exit_code(error: BaseException, reports: Reports) -> int:
    if isinstance(error, Requeue):
        return 0 if torchrun.is_launched() else error.code  # a launcher would restart the ranks
    if isinstance(error, KeyboardInterrupt):
        return 128 + (error.number if isinstance(error, Terminated) else signal.SIGINT)
    return 2 if isinstance(error, UserError) and error not in reports.shown else 1


@dataclass(frozen=True)
class _App:
    """One command line."""

    project: Path | None
    """The folder whose Python files a config may name; None: no project is trusted."""
    configs: Path
    name: str
    """Of the primary config."""
    reports: Reports
    peers: Peers
    """The other ranks, if this process is one of several."""

    def run(self, argv: Sequence[str]) -> int:
        """Do what the arguments ask for: run a command, show something, or train once or in a sweep.

        Returns:
            The exit code.
        """
        if environment.is_received():
            from hydraloop.sweeps.job import received_arguments

            argv = received_arguments(argv)
        job: Mapping[str, Any] | None = None
        if torchrun.is_ours():
            argv, job = private.of_rank(argv)
        args = arguments.read(argv)
        environment.set_command([*environment.script(), *args.config_flags])
        found = None if job is not None or args.shell_completion else parser.find(args.overrides, asks=args.help)
        if found is not None or self.project is None:
            return self._command(found, args, argv)
        return self._train(args, argv, job)

    def _command(self, found: parser.Found | None, args: argparse.Namespace, argv: Sequence[str]) -> int:
        if args.help:
            show(parser.listing() if found is None else parser.help_of(found.name))
            return 0
        if found is None:
            raise UserError("hydraloop trains nothing itself", remedy=f"Type python train.py …\n{parser.listing()}")
        if found.name not in parser.OF_PROJECTS:
            words = list(argv)
            words.remove(found.name)
            return dispatch.run([found.name, *words])
        if self.project is None and found.name in ("resume", "check"):
            remedy = f"The project's script does that: {shlex.join(['python', 'train.py', *argv])}"
            raise UserError("it runs the code of a project", key=found.name, remedy=remedy)
        if found.name == "check":
            args.overrides = [*found.before, *found.words]
            return self._train(args, argv, checks=True)
        typed = parser.on_run(found, args)
        if found.name == "resume":
            environment.set_command([*environment.script(), typed.name, str(typed.run)])
            return self._train(args, argv, resumes=typed)
        with uncollected():
            from hydraloop.commands import on_ranks  # imports torch

        on_ranks.run(typed, argv, self.peers)
        return 0

    def _train(
        self,
        args: argparse.Namespace,
        argv: Sequence[str],
        job: Mapping[str, Any] | None = None,
        *,
        checks: bool = False,
        resumes: parser.OnRun | None = None,
    ) -> int:
        """Compose the config of the project or of a run, and show it, check the project, or train.

        Args:
            job: of a sweep, of which this process is a rank.
        """
        name = (args.config_name or self.name) if resumes is None else saved_config.NAME
        folder = self.configs if args.config_path is None else self.configs.parent / args.config_path
        if folder.name == RECORDS:
            remedy = f"Continue it: {shlex.join([*environment.script(), 'resume', str(folder.parent)])}"
            raise UserError(f"{folder} has the config of a run", key="--config-path", remedy=remedy)
        if resumes is not None and not folder.is_dir():
            folder = _SCHEMAS
        with opened(folder, name, args.config_dir) as composer:
            if args.shell_completion:
                if parser.COMMANDS.keys().isdisjoint(os.environ.get("COMP_LINE", "").split()):
                    with redirect_stderr(io.StringIO()), suppress(Exception, SystemExit):  # a mistake in what was typed
                        composer.complete(args.overrides)
                return 0
            if environment.is_received():
                from hydraloop.sweeps.job import run_received_job

                run_received_job(composer, self._starter())
            if job is not None:
                from hydraloop.sweeps.job import train_rank

                train_rank(job, args.overrides, composer, self._starter())
                return 0
            if args.help:
                show_help(args, composer, parser.listed_names())
                return 0
            with redirect_stderr(io.StringIO()) if torchrun.is_ours() else nullcontext():  # it was said already
                if resumes is None:
                    draft = check_command(args, composer)
                else:
                    draft = resume.check_resume(resumes.run, resumes.overrides, composer)
            remember_config(draft.cfg)
            if args.dry_run and not checks:
                show_plan(draft, as_json=args.json)
                return 0
            if args.json:
                raise arguments.no_json()
            if checks:
                from hydraloop.commands import check

                return check.run(draft, argv, self.peers)
            if args.cfg is not None:
                show_config(draft, args)
                return 0
            if args.pdb:
                check_debugger(draft.cfg, is_sweep=draft.is_sweep)
                self.reports.with_debugger = True
            self._start(draft, argv, resumes=resumes is not None)
            return 0

    def _start(self, draft: Draft, argv: Sequence[str], *, resumes: bool) -> None:
        if draft.is_sweep:
            from hydraloop.commands import sweep
            from hydraloop.sweeps import check_sweep

            assert isinstance(draft, check_sweep.SweepDraft)
            sweep.run(draft, self._starter())
        if draft.cfg.sweep.executor == "submitit" and not resumes and not torchrun.is_several():
            from hydraloop.sweeps import submit_to_slurm

            if submit_to_slurm.is_run(draft):
                return submit_to_slurm.submit_run(draft)
        return self._starter().run(draft, argv)

    def _starter(self) -> RunStarter:
        from hydraloop.launch.run_starter import RunStarter

        return RunStarter(self.reports, self.peers)
