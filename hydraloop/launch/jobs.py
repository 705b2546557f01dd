"""Runs one job, or those of a sweep: determines the directory, trains, and reports errors. A job imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from hydraloop.cli import hydra_run
from hydraloop.cli.command import Command
from hydraloop.cli.error_reports import Reports
from hydraloop.cli.run_directories import settle_job, settle_run, settle_sweep
from hydraloop.errors import Terminated, UserError
from hydraloop.launch import checks as launch_checks
from hydraloop.launch import elastic, torchrun
from hydraloop.launch.failure import Ended, RankError, Requeue
from hydraloop.launch.job import Job
from hydraloop.launch.rank_training import Training
from hydraloop.launch.termination import TerminationHandler
from hydraloop.run import attempts
from hydraloop.run.result import Result, ResultFile
from hydraloop.run.resume import Resumed
from hydraloop.run.uncollected import uncollected
from hydraloop.safety import typed_options
from hydraloop.safety.allowlist import ALLOWLIST
from hydraloop.safety.secrets import remember_overrides
from hydraloop.tracking.sweeps import SweepTrackers

ACCEPT_NAN = ("hydra_plugins.hydra_nevergrad_sweeper.nevergrad_sweeper.NevergradSweeper",)
"""Sweepers of Hydra to which a diverged job returns NaN. For others it raises its error: Optuna's ends at a NaN."""


@dataclass
class Jobs:
    """What a command line trains."""

    project: Path
    """The folder whose Python files a config may name."""
    trusted: tuple[str, ...]
    """Packages that a config may name."""
    reports: Reports
    leader: torchrun.Leader
    """Tells the other ranks of a torchrun what to train."""
    on_start: Callable[[Path], None] = lambda run_dir: None
    """Called when a single run has its directory, and before anything is imported for it."""
    on_build: Callable[[int], None] = lambda iterations: None
    """Called before training with the iterations of the whole run, if one process trains."""

    def use_debugger(self, command: Command) -> None:
        """Open the debugger after an error of the run, or refuse to."""
        launch_checks.check_debugger(command.cfg, is_sweep=command.is_sweep)
        self.reports.with_debugger = True

    def run_once(self, command: Command, name: str) -> None:
        """Train once, in the directory that the config names. A composer has to be open. An error has been reported."""
        launch_checks.check(command.cfg)
        with ExitStack() as locks:
            checkpoint = settle_run(command, torchrun.earlier(command.cfg.resume), locks)

            def job(cfg: DictConfig, run_dir: Path) -> float | None:
                self.on_start(run_dir)
                return self.train(cfg, run_dir, checkpoint, typed=command.typed)

            hydra_run.run_composed(job, command.cfg, name)

    def run_sweep(self, command: Command, flags: list[str], folder: Path, name: str) -> None:
        """Train the jobs of a sweep, as Hydra's sweeper and launcher run them. An error has been reported.

        Args:
            flags: the arguments that are not overrides.
            folder: with the config files; `name` is that of the primary config.
        """
        launch_checks.check_single_run()
        trackers = SweepTrackers(command.axes, command.jobs)
        lines, typed = command.overrides, command.typed  # a launcher pickles the job, and cannot pickle the plan

        def job(cfg: DictConfig, run_dir: Path) -> float | None:
            self._begin_process(lines)
            with ExitStack() as lock:
                try:
                    launch_checks.check(cfg)
                    sweep = hydra_run.sweep_dir()
                    settle_job(run_dir, sweep, HydraConfig.get().job.num, lock, held=sweep)
                except UserError as error:
                    self.reports.start_job()
                    self.reports.end_job(error)
                    raise
                try:
                    return self.train(cfg, run_dir, None, typed=typed)
                except Exception:
                    result = Result.read(run_dir)
                    if HydraConfig.get().sweeper._target_ in ACCEPT_NAN and result is not None and result.has_diverged:
                        return math.nan
                    raise

        with ExitStack() as locks:
            directory, overrides = settle_sweep(command, locks)
            try:
                trackers.share_senders()
                trackers.begin(directory)
                hydra_run.run_sweep(job, [*flags, *overrides], folder, name)
            except BaseException as error:
                trackers.ended = "interrupted" if isinstance(error, KeyboardInterrupt) else "failed"
                raise
            finally:
                trackers.end(directory)
                self.reports.print_sweep(interrupted=trackers.ended == "interrupted")

    def _begin_process(self, overrides: Sequence[str]) -> None:
        """Prepare this process, which a launcher may have started. A method: joblib would copy globals of a closure."""
        ALLOWLIST.trust_folder(self.project)
        ALLOWLIST.trust(self.trusted)
        remember_overrides(overrides)

    def train(self, cfg: DictConfig, run_dir: Path, checkpoint: Path | None, *, typed: Sequence[str]) -> float | None:
        """Train in this process, or in several, as Hydra's job. The directory is locked, and has Hydra's records.

        Args:
            checkpoint: where the run continues; None for a new run.
            typed: the keys that the command line sets.

        Returns:
            What a sweep optimizes: the best, else the last, validation.

        Raises:
            BaseException: the error of the run. It is in `result.json`, and was shown by `reports`.
        """
        self.reports.start_job()
        typed_options.remember(cfg, typed)
        records = run_dir / (HydraConfig.get().output_subdir or "")
        result = ResultFile(run_dir, records if attempts.is_attempt(records) else None)

        def close(ended: Ended) -> None:
            if ended.error is None:
                return
            if isinstance(ended.error, Requeue):
                self.reports.end_job(ended.error, in_summary=True)
                return
            trace = ended.error.trace if isinstance(ended.error, RankError) else None
            self.reports.end_job(ended.error, trace=trace, in_summary=result.has(ended.error))
            if isinstance(ended.error, KeyboardInterrupt) and result.is_complete:
                return  # a signal at the end does not change how the run has ended
            result.set_error(ended.error)
            if not ended.trained:
                result.put_back()

        if launch_checks.several(cfg):
            ended = self._train_ranks(cfg, Resumed(run_dir, checkpoint), close)
            if isinstance(ended.error, RankError) and ended.error.was_killed and result.is_complete:
                ended = Ended.with_result(run_dir)  # the rank was killed after that
            close(ended)
        else:
            ended = _train_alone(cfg, Resumed(run_dir, checkpoint), close, self.on_build)
        if ended.error not in self.reports.shown:  # the run has finished; a signal may have come at its end
            self.reports.end_job()
        if ended.error is not None:
            raise ended.error
        return ended.value

    def _train_ranks(self, cfg: DictConfig, resumed: Resumed, close: Callable[[Ended], None]) -> Ended:
        """Train with the other ranks of the torchrun that this process is part of, or start the ranks."""
        try:
            job = Job.of(cfg, resumed, folders=[self.project], trusted=self.trusted)
            if torchrun.is_several():
                return self.leader.lead(job, job.public(cfg), close)
            options = cfg.distributed
            return elastic.launch(job, processes=options.nproc_per_node, max_restarts=options.max_restarts)
        except BaseException as error:
            return Ended(error=error, trained=False)


def _train_alone(
    cfg: DictConfig, resumed: Resumed, close: Callable[[Ended], None], on_build: Callable[[int], None]
) -> Ended:
    """Build and train in a single process. SIGTERM and SIGHUP end the run as Ctrl-C does, unless they preempt it.

    Args:
        resumed: its directory, and where it continues.
        close: called once when the run has ended. If it has failed, or was interrupted or preempted, no signal
            interrupts this call. Called from another thread if the main thread does not return within
            `termination.GRACE` seconds after a signal.
    """
    training = Training()
    run_dir = resumed.run_dir
    assert run_dir is not None, "Hydra has made the directory"

    def last(number: int) -> None:
        result = None if training.engine is None else training.engine.result
        if result is None or result.error is not None:  # a run that has finished keeps its result
            error = None if training.engine is None else training.engine.error
            close(Ended(error=error or Terminated(number), trained=training.has_trained()))

    handler = TerminationHandler(last, launched=torchrun.is_launched())
    handler.is_closing, handler.is_saving = training.is_closing, training.is_saving
    handler.start()
    try:
        with uncollected():
            from hydraloop.builder import build  # imports torch

        torchrun.remember(run_dir, resumed.checkpoint)
        training.engine = build(cfg, run_dir=run_dir, resumed=resumed)
        on_build(training.engine.max_iters)
        training.engine.train()
        ended = Ended.with_result(run_dir)
    except BaseException as error:
        training.is_over = True
        # After a preemption, the earlier handler of the signal may raise anything, and nothing has failed.
        result = training.engine.result if training.is_saving() else None
        saved = result is not None and result.status == "interrupted"
        ended = Ended.with_result(run_dir) if saved else Ended(error=error, trained=training.has_trained())
        close(ended)
    else:
        close(ended)
    finally:
        handler.stop()
    if handler.received and not isinstance(ended.error, KeyboardInterrupt):  # while the run was closing
        return Ended(error=Terminated(handler.received))
    return ended
