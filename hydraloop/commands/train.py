"""`python train.py`: compose and check the config; then show it, or train by it, once or in a sweep.

A mistake that can be found without torch is found before anything is written. A module that only some command lines
need is imported there, so that `--help` and `--dry-run` are fast.
"""

from __future__ import annotations

import argparse
import io
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, redirect_stderr, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop import schemas
from hydraloop.commands import parser
from hydraloop.commands.resume import check_resume
from hydraloop.config import arguments, checks, saved_config
from hydraloop.config.checks import Draft
from hydraloop.config.compose import Composer, opened
from hydraloop.config.dry_run import show_config, show_plan
from hydraloop.config.help import show_help
from hydraloop.config.messages import unknown_flag
from hydraloop.errors import UserError
from hydraloop.files import environment
from hydraloop.files.config_yaml import remember_config
from hydraloop.files.error_reports import Reports
from hydraloop.files.run_directory import RECORDS
from hydraloop.launch import torchrun
from hydraloop.launch.other_ranks import Peers
from hydraloop.launch.torchrun import check_debugger, check_options

if TYPE_CHECKING:
    from hydraloop.launch.start import RunStarter

NO_CONFIGS = Path(schemas.__file__).parent
"""A folder without config files."""


@dataclass(frozen=True)
class TrainCommand:
    """The commands that compose the config of a project or of a run: to train, `check` and `resume`."""

    configs: Path
    """The folder with config files."""
    name: str
    """Of the primary config."""
    reports: Reports
    peers: Peers
    """The other ranks, if this process is one of several."""

    def run(self, args: argparse.Namespace, argv: Sequence[str], job: Mapping[str, Any] | None) -> int:
        """Train once or in a sweep, or show what the flags ask for. Return the exit code.

        Args:
            argv: all arguments.
            job: of a sweep, of which this process is a rank.
        """
        with self._opened(args) as composer:
            if args.shell_completion:
                _complete(args, composer)
                return 0
            if environment.is_received():
                from hydraloop.sweeps.job import run_job_and_exit

                run_job_and_exit(composer, self._starter())
            if job is not None:
                from hydraloop.sweeps.job import train_rank

                train_rank(job, args.overrides, composer, self._starter())
                return 0
            if args.help:
                show_help(args, composer, parser.listed_names())
                return 0
            draft = _checked(lambda: check_command(args, composer))
            if not _is_shown(draft, args):
                self._train(draft, args, argv)
            return 0

    def check(self, args: argparse.Namespace, argv: Sequence[str]) -> int:
        """Test the project with short runs. Return the exit code."""
        with self._opened(args) as composer:
            draft = _checked(lambda: check_command(args, composer))
            if args.json:
                raise arguments.no_json()
            from hydraloop.commands import check

            return check.run(draft, argv, self.peers)

    def resume(self, args: argparse.Namespace, argv: Sequence[str], typed: parser.OnRun) -> int:
        """Continue a run with its saved config, or show that config. Return the exit code."""
        with self._opened(args, saved_config.NAME) as composer:
            draft = _checked(lambda: check_resume(typed.run, typed.overrides, composer))
            if not _is_shown(draft, args):
                self._train(draft, args, argv, resumes=True)
            return 0

    def _opened(self, args: argparse.Namespace, saved: str | None = None) -> AbstractContextManager[Composer]:
        """Open the config of the project, or with `saved` that of a run, which needs no folder."""
        folder = self.configs if args.config_path is None else self.configs.parent / args.config_path
        if folder.name == RECORDS:
            remedy = f"Continue it: {shlex.join([*environment.script(), 'resume', str(folder.parent)])}"
            raise UserError(f"{folder} has the config of a run", key="--config-path", remedy=remedy)
        if saved is not None and not folder.is_dir():
            folder = NO_CONFIGS
        return opened(folder, saved or args.config_name or self.name, args.config_dir)

    def _train(self, draft: Draft, args: argparse.Namespace, argv: Sequence[str], *, resumes: bool = False) -> None:
        """Start the sweep or the run: here, on Slurm, or in ranks."""
        if args.pdb:
            check_debugger(draft.cfg, is_sweep=draft.is_sweep)
            self.reports.with_debugger = True
        if draft.is_sweep:
            from hydraloop.commands import sweep
            from hydraloop.sweeps.check_sweep import SweepDraft

            assert isinstance(draft, SweepDraft)
            sweep.run(draft, self._starter())
        if draft.cfg.sweep.executor == "submitit" and not resumes and not torchrun.is_several():
            from hydraloop.sweeps import submit_to_slurm

            if submit_to_slurm.is_run(draft):
                return submit_to_slurm.submit_run(draft)
        return self._starter().run(draft, argv)

    def _starter(self) -> RunStarter:
        from hydraloop.launch.start import RunStarter

        return RunStarter(self.reports, self.peers)


def check_command(args: argparse.Namespace, composer: Composer) -> Draft:
    """Compose and check the config of the run, or each value of each axis of the sweep.

    Raises:
        UserError: a mistake in the overrides or in the config files.
    """
    if args.unknown:
        raise unknown_flag(args.unknown[0], args, composer)
    typed = arguments.typed(args.overrides)
    if checks.is_sweep(typed, args, composer):
        from hydraloop.sweeps import check_sweep

        return check_sweep.check(args, composer)
    draft = checks.check_run(typed, composer, trains=args.cfg is None)
    check_options(draft.cfg)
    return draft


def _checked(check: Callable[[], Draft]) -> Draft:
    """Compose and check. A rank that hydraloop has started does not repeat what the first process has printed."""
    with redirect_stderr(io.StringIO()) if torchrun.is_ours() else nullcontext():
        draft = check()
    remember_config(draft.cfg)
    return draft


def _is_shown(draft: Draft, args: argparse.Namespace) -> bool:
    """Print what `--dry-run` or `--cfg` asks for. Return whether it was asked for, so that nothing is trained."""
    if args.dry_run:
        show_plan(draft, as_json=args.json)
        return True
    if args.json:
        raise arguments.no_json()
    if args.cfg is not None:
        show_config(draft, args)
        return True
    return False


def _complete(args: argparse.Namespace, composer: Composer) -> None:
    """Let Hydra answer a press of Tab, unless a command is typed. Prints nothing about a mistake."""
    if parser.COMMANDS.keys().isdisjoint(os.environ.get("COMP_LINE", "").split()):
        with redirect_stderr(io.StringIO()), suppress(Exception, SystemExit):
            composer.complete(args.overrides)
