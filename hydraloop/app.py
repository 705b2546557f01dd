"""`hydraloop.main()`: arguments → checks → Hydra → one job, or each of a sweep. The only file that knows sys.argv.

Everything that can be wrong with a command line is found before Hydra makes a directory; torch is imported when the
first job starts.
"""

from __future__ import annotations

import argparse
import glob
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from hydraloop.cli import arguments, checks, hydra_run, plan
from hydraloop.cli import checked_compose as checked
from hydraloop.cli import compose as composing
from hydraloop.cli import explain as mistakes
from hydraloop.cli.console import mask_handlers
from hydraloop.cli.help import format_help
from hydraloop.cli.search_path import check_search_path
from hydraloop.cli.sweep_jobs import Jobs
from hydraloop.errors import UserError
from hydraloop.launch import checks as launch_checks
from hydraloop.launch import elastic, single_process, torchrun
from hydraloop.launch.failure import Ended, RankError, Terminated
from hydraloop.launch.job import Job
from hydraloop.launch.termination import terminable
from hydraloop.run import attempts
from hydraloop.run import directory as run_directory
from hydraloop.run.config_yaml import mask_files, mask_records, remember_config
from hydraloop.run.environment import command
from hydraloop.run.lock import RunLock
from hydraloop.run.result import ResultFile, describe
from hydraloop.safety import typed_options as typed
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.safety.secrets import mask_text, remember_overrides
from hydraloop.tracking.sweeps import SweepTrackers
from hydraloop.validate import hydra_config

log = logging.getLogger("hydraloop")

_FOR_HYDRA = ("hydra_help", "info", "shell_completion")
"""Flags that need none of our checks."""


def main(
    *, config_path: str = "conf", config_name: str = "config", trusted: Sequence[str] = (), folder: Path | None = None
) -> None:
    """Run what the command line says, and exit.

    Exit codes: 0 done, 1 a run failed, 2 a mistake in the command line; ended by Ctrl-C 130, SIGTERM 143, SIGHUP 129.

    Args:
        config_path: the folder with config files, relative to the calling file.
        config_name: the primary config in it, without `.yaml`.
        trusted: packages whose classes a config may name in `_target_`, besides the allowlist's own.
        folder: stands for the calling file's folder; its Python files may be named in `_target_` too.
    """
    folder = folder or Path(sys._getframe(1).f_code.co_filename).resolve().parent
    ALLOWLIST.trust_folder(folder)
    ALLOWLIST.trust(trusted)
    ALLOWLIST.is_in_main = True
    show_all = os.environ.get(hydra_run.FULL_ERROR) == "1"
    if torchrun.is_several():
        torchrun.keep_quiet()
    if torchrun.rank() > 0:
        sys.exit(torchrun.follow())
    app = _App(folder / config_path, config_name, show_all, project=folder, trusted=tuple(trusted))
    code = 1
    try:
        with terminable():
            app.run(sys.argv[1:])
        code = 0
    except UserError as error:
        if error not in app.reported:
            _print_mistake(error, show_all)
            code = 2
    except SystemExit as error:  # argparse has printed what is wrong, or what was asked for
        if torchrun.is_several():
            app.leader.leave(1 if error.code else 0)
        raise
    except KeyboardInterrupt as error:
        if error not in app.reported:
            print(f"error: {_interruption(error)}", file=sys.stderr)
        code = 128 + (error.number if isinstance(error, Terminated) else signal.SIGINT)
    except Exception as error:
        if error not in app.reported:
            _print_exception(error)
    if torchrun.is_several():
        app.leader.leave(code)
    if code:
        sys.exit(code)


def _interruption(error: KeyboardInterrupt) -> str:
    return f"ended {error}" if isinstance(error, Terminated) else "interrupted"


def _print_mistake(error: UserError, show_all: bool) -> None:
    if show_all:
        _print_exception(error)
    else:
        print(mask_text(f"error: {error}"), file=sys.stderr)


def _print_exception(error: BaseException) -> None:
    print(mask_text("".join(traceback.format_exception(error))), end="", file=sys.stderr)


@dataclass
class _App:
    """One command line."""

    folder: Path
    name: str
    show_all: bool
    """Whether mistakes are shown with their traceback, too."""
    project: Path
    """The folder whose Python files a config may name."""
    trusted: tuple[str, ...] = ()
    """Packages that a config may name."""
    typed: list[str] = field(default_factory=list)
    """Keys that the command line sets; Hydra's own list of overrides also has those of a sweep in a config file."""
    leader: torchrun.Leader = field(default_factory=torchrun.Leader)
    """What is told to the other ranks of a torchrun."""
    restarted: run_directory.Resumed | None = None
    """Where torchrun's restart of the run goes on; None: it is no restart."""
    reported: list[BaseException] = field(default_factory=list)
    """Errors of jobs, shown when they happened."""
    jobs: Jobs = field(default_factory=Jobs)
    """What has become of the jobs."""
    directories: set[Path] = field(default_factory=set)
    """Of the jobs of this sweep that have started, resolved."""
    trackers: SweepTrackers = field(default_factory=SweepTrackers)
    """What tracks the jobs of a sweep."""

    def run(self, argv: Sequence[str]) -> None:
        argv, dry_run = arguments.take_dry_run(argv)
        remember_overrides(argv)
        args = arguments.read(argv)
        if args.experimental_rerun is not None:
            raise UserError(
                "it loads a pickle file", key="--experimental-rerun", remedy="Use resume=… or --config-dir."
            )
        folder, name = self._where(args)
        if args.config_path is not None:  # Hydra would look for a relative one beside this file; the last one counts
            argv = [*argv, "--config-path", str(folder.absolute())]
        extra = None if args.config_dir is None else Path(args.config_dir)
        if any(getattr(args, flag) for flag in _FOR_HYDRA):
            with composing.opened(folder, name, extra):
                check_search_path(name, [line for line in args.overrides if line.startswith("hydra")])
            hydra_run.run(self._job, argv, folder, name)
            return
        with composing.opened(folder, name, extra) as composer:
            if args.help:
                print(format_help(composer, command()))
                return
            starts = args.cfg is None and not dry_run
            overrides, multirun, cfg = _checked(args, composer, self.trackers, starts=starts)
            self.typed = typed.keys_of(overrides)
            if dry_run:
                print(plan.format_plan(cfg))
                return
        with ExitStack() as locks:
            sweep: Path | None = None
            if args.cfg is None:
                directory, overrides = self._settled(cfg, overrides, multirun, locks)
                sweep = directory if multirun else None
            self._run([*_flags(argv, args), *overrides], folder, name, sweep)

    def _run(self, argv: list[str], folder: Path, name: str, sweep: Path | None) -> None:
        """Hand the command line to Hydra.

        Args:
            sweep: the directory of the sweep; None: there is one job, or none.
        """
        try:
            if sweep is not None:
                self.trackers.begin(sweep)
            hydra_run.run(self._job if sweep is None else self._job_of_sweep, argv, folder, name)
        except KeyboardInterrupt:
            self.trackers.interrupted = True
            raise
        finally:
            self.trackers.end()
            summary = self.jobs.summary(interrupted=self.trackers.interrupted) if sweep is not None else None
            if summary is not None:
                print(summary, file=sys.stderr)

    def _where(self, args: argparse.Namespace) -> tuple[Path, str]:
        folder = self.folder if args.config_path is None else self.folder.parent / args.config_path
        return folder, args.config_name or self.name

    def _job_of_sweep(self, cfg: DictConfig) -> float | None:
        """`_job`, in a directory that is locked and known to be free. That of a single run is before Hydra makes it."""
        run_dir = self._begin(cfg)
        with ExitStack() as locks:
            try:
                self._settle_job(run_dir, locks)
            except UserError as error:
                self._report(error)
                raise
            return self._train(cfg, run_dir)

    def _job(self, cfg: DictConfig) -> float | None:
        """One run, in the directory Hydra made. Returns what a sweep optimises: the best, else the last, validation."""
        return self._train(cfg, self._begin(cfg))

    def _begin(self, cfg: DictConfig) -> Path:
        """Note the job that Hydra has just started, mask its records, and return its directory."""
        self.jobs.start(self.trackers.axes)
        run_dir = Path(HydraConfig.get().runtime.output_dir)
        typed.remember(cfg, self.typed)
        _hide_secrets(cfg, run_dir)
        return run_dir

    def _train(self, cfg: DictConfig, run_dir: Path) -> float | None:
        records = run_dir / (HydraConfig.get().output_subdir or "")
        result = ResultFile(run_dir, records if attempts.is_attempt(records) else None)

        def close(ended: Ended) -> None:
            if ended.error is None:
                return
            self._report(ended.error)
            result.set_error(ended.error)
            if not ended.trained:
                result.put_back()

        if launch_checks.several(cfg):
            ended = self._by_ranks(cfg, run_dir, close)
            close(ended)
        else:
            ended = single_process.train(cfg, run_dir, close, self.restarted)
        if ended.error not in self.reported:  # the run has finished; a signal may have come at its end
            self.jobs.end(None)
        if ended.error is not None:
            raise ended.error
        return ended.value

    def _by_ranks(self, cfg: DictConfig, run_dir: Path, close: Callable[[Ended], None]) -> Ended:
        """The run, trained by several processes: of our own, or of the torchrun this one is part of."""
        try:
            resumed = self.restarted or run_directory.settle(cfg, run_dir)
            job = Job.of(cfg, resumed, folders=[self.project], trusted=self.trusted)
            if torchrun.is_several():
                return self.leader.lead(job, close)
            options = cfg.distributed
            return elastic.launch(job, processes=options.nproc_per_node, max_restarts=options.max_restarts)
        except BaseException as error:
            return Ended(error=error, trained=False)

    def _settled(
        self, cfg: DictConfig, overrides: list[str], multirun: bool, locks: ExitStack
    ) -> tuple[Path, list[str]]:
        """The directory, and the overrides that fix it: it is locked, known to be writable and not another run's.

        Args:
            locks: gets the lock.

        Raises:
            UserError: it cannot be written, it is locked, it holds a run, or there is nothing to resume.
        """
        key = "hydra.sweep.dir" if multirun else "hydra.run.dir"
        typed = any(line.lstrip("+").startswith(f"{key}=") for line in overrides)
        with hydra_config(cfg):
            directory = Path(cfg.hydra.sweep.dir if multirun else cfg.hydra.run.dir)
        fixed = {key: directory}
        launched = None if multirun else torchrun.earlier(*_patterns(cfg, directory))
        named = directory if typed or (cfg.resume == "auto" and _is_constant(cfg)) else None
        found = _found(cfg, launched, named)
        wait = cfg.resume == "auto" or launched is not None
        locked = found.run_dir or directory
        locks.enter_context(RunLock(locked, key=key if cfg.resume is None else "resume", wait=wait))
        found = _found(cfg, launched, found.run_dir or named)  # another process may have trained there until now
        if launched is not None:
            self.restarted = found
            print(f"restarted in {found.run_dir}, from {found.checkpoint or 'the beginning'}")
        if found.run_dir is not None:
            fixed = {key: found.run_dir, "hydra.output_subdir": attempts.following(found.run_dir)}
            fixed["hydra.output_subdir"] = fixed["hydra.output_subdir"].relative_to(found.run_dir)
        elif cfg.resume == "auto":
            print(f"{directory} has no checkpoint: a new run starts there", file=sys.stderr)
        else:
            remedy = "Name another directory" + ("." if multirun else f", or go on with it: resume={directory}")
            run_directory.refuse_held(directory, key=key, remedy=remedy)
            if multirun and (directory / "multirun.yaml").exists():
                raise UserError(f"{directory} holds a run already", key=key, remedy=remedy)
        others = [line for line in overrides if line.lstrip("+").partition("=")[0] not in fixed]
        return fixed[key], [*others, *(f"{name}={hydra_run.quoted(path)}" for name, path in fixed.items())]

    def _settle_job(self, run_dir: Path, locks: ExitStack) -> None:
        """Check and lock the directory of a sweep's job.

        Args:
            locks: gets the lock.

        Raises:
            UserError: it is outside the sweep's, another job of this sweep has had it, it is locked, or it holds a run.
        """
        key, remedy = "hydra.sweep.subdir", "Let it tell the jobs apart: ${hydra.job.num}."
        sweep, resolved = _sweep_dir(), run_dir.resolve()
        if not resolved.is_relative_to(sweep.resolve()):
            raise UserError(f"{run_dir} is outside the sweep's directory, {sweep}", key=key, remedy=remedy)
        if resolved in self.directories:
            raise UserError(f"{run_dir} is another job's already", key=key, remedy=remedy)
        if resolved != sweep.resolve():  # which is locked already
            locks.enter_context(RunLock(run_dir, key=key))
        if run_directory.has_trained(run_dir):  # Hydra has written this job's records
            raise UserError(f"{run_dir} holds a run already", key=key, remedy=remedy)
        self.directories.add(resolved)

    def _report(self, error: BaseException) -> None:
        """Show an error of a job when it happens, in the terminal and in train.log."""
        self.reported.append(error)
        self.jobs.end(error)
        if isinstance(error, KeyboardInterrupt):
            log.error("%s", _interruption(error))
        elif isinstance(error, RankError):
            log.error("%s", "\n".join(filter(None, (str(error), error.trace.rstrip()))))
        elif isinstance(error, UserError) and not self.show_all:
            log.error("%s", error)
        else:
            log.error("%s", describe(error), exc_info=error)


def _hide_secrets(cfg: DictConfig, run_dir: Path) -> None:
    """Mask them in what Hydra has just written, and from now on in every log message."""
    remember_config(cfg)
    mask_handlers()
    hydra = HydraConfig.get()
    if hydra.output_subdir is not None:
        mask_records(run_dir / hydra.output_subdir)
    if hydra.mode is RunMode.MULTIRUN:
        mask_files([_sweep_dir() / "multirun.yaml"])


def _sweep_dir() -> Path:
    """The directory of the sweep that is running, also from within a job's (`hydra.job.chdir=true`)."""
    hydra = HydraConfig.get()
    return Path(hydra.runtime.cwd, hydra.sweep.dir)


def _checked(
    args: argparse.Namespace, composer: composing.Composer, trackers: SweepTrackers, *, starts: bool
) -> tuple[list[str], bool, DictConfig]:
    """The overrides to hand to Hydra, whether they are a sweep, and the config (of a sweep's first job).

    Args:
        trackers: gets to know those of a sweep's jobs.
        starts: whether something is to be trained, not only shown.

    Raises:
        UserError: anything wrong with what was typed, or with the config files.
    """
    typed = list(args.overrides)
    parsed = arguments.parse(typed)
    arguments.refuse_null_groups(parsed)
    checks.check_groups(parsed, composer)
    lines, rewritten = arguments.with_hook_lists(typed)
    multirun = args.multirun or _mode_is_multirun(lines, composer)
    if multirun:
        lines = arguments.with_hook_options_swept(typed)
    elif rewritten:
        print(f"read as a list: {' '.join(rewritten)}", file=sys.stderr)
    if not multirun:
        cfg = checked.compose(lines, composer, trains=args.cfg is None)
        if starts:
            launch_checks.check(cfg)
        return lines, False, cfg
    return lines, True, _checked_sweep(args, lines, composer, trackers, starts=starts)


def _checked_sweep(
    args: argparse.Namespace, lines: list[str], composer: composing.Composer, trackers: SweepTrackers, *, starts: bool
) -> DictConfig:
    """The config of a sweep's first job; those of all are checked."""
    if starts:
        launch_checks.check_single_run()
    parsed = arguments.parse(lines)
    first: DictConfig | None = None
    swept = composing.swept(checked.compose_sweep(lines, composer), parsed)
    trackers.axes = [override.key_or_group for override in swept if arguments.is_sweep(override)]
    for job in composing.jobs(swept):
        try:
            cfg = checked.compose(job, composer, typed=lines, trains=args.cfg is None)
            if starts:
                launch_checks.check(cfg)
        except UserError as error:
            problem = f"{error.problem}, in the job {' '.join(job)}"
            raise UserError(problem, key=error.key, remedy=error.remedy) from error
        if cfg.resume is not None:
            raise UserError("the jobs of a sweep would go on in one directory", key="resume", remedy="Use load_from=…")
        trackers.see(cfg)
        first = first or cfg
    assert first is not None, "a product of axes with values has an element"
    return first


def _mode_is_multirun(lines: Sequence[str], composer: composing.Composer) -> bool:
    """Whether `hydra.mode` says MULTIRUN, on the command line or in a config file."""
    plain = [override.input_line or "" for override in arguments.parse(lines) if not arguments.is_sweep(override)]
    for attempt in (plain, [line for line in plain if line.startswith("hydra")]):
        try:
            mode = composer.compose(attempt).hydra.mode
        except mistakes.COMPOSING_ERRORS:
            continue
        return mode is not None and mode.name == "MULTIRUN"
    return False


def _is_constant(cfg: DictConfig) -> bool:
    """Whether the config files name one run directory, not a new one for each start."""
    return not any(new in _written(cfg) for new in ("${now:", "${run_id:"))


def _written(cfg: DictConfig) -> str:
    """`hydra.run.dir` with its interpolations."""
    run: Any = OmegaConf.to_container(cfg.hydra.run, resolve=False)
    return str(run["dir"])


def _found(cfg: DictConfig, launched: torchrun.Launched | None, named: Path | None) -> run_directory.Resumed:
    """Where the run continues; nowhere if it is new.

    Args:
        launched: the first start, if this is torchrun's restart of the run.
        named: the run directory that the user has named, if any.
    """
    if launched is not None:
        return launched.resumed()
    return run_directory.Resumed(None, None) if cfg.resume is None else run_directory.find(cfg, named)


def _patterns(cfg: DictConfig, directory: Path) -> list[str]:
    """Where other starts of the same command line have their run directories, as of `Path.glob`."""
    resumed = None if cfg.resume in (None, "auto") else run_directory.run_of(Path(cfg.resume))
    return [_pattern(cfg, directory), *([] if resumed is None else [glob.escape(str(resumed.absolute()))])]


def _pattern(cfg: DictConfig, directory: Path) -> str:
    written = Path(_written(cfg)).parts
    parts = directory.absolute().parts
    if len(written) > len(parts):
        return str(directory.absolute())
    known = parts[: len(parts) - len(written)]
    return str(Path(*known, *("*" if "${" in one else glob.escape(one) for one in written)))


def _flags(argv: Sequence[str], args: argparse.Namespace) -> list[str]:
    """The arguments that are no overrides, in their order."""
    overrides = list(args.overrides)
    flags = []
    for argument in argv:
        if argument in overrides:
            overrides.remove(argument)
        else:
            flags.append(argument)
    return flags
