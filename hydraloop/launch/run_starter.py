"""Starts a run: makes its plan, and trains by it in this process, or starts ranks that do so. Reports its error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

from omegaconf import DictConfig

from hydraloop.config.checks import Draft, hydra_config
from hydraloop.config.hydra_keys import variables
from hydraloop.errors import Terminated
from hydraloop.files import console, environment
from hydraloop.files.checkpoint_files import candidates
from hydraloop.files.error_reports import Reports
from hydraloop.files.result import ResultFile
from hydraloop.files.run_directory import checkpoint_folders
from hydraloop.importing import uncollected
from hydraloop.launch import checks, detach, elastic, rank_training, slurm, torchrun
from hydraloop.launch.failure import Ended, Failure, RankError, Requeue
from hydraloop.launch.peers import Peers
from hydraloop.launch.plan import LOG, RunPlan, of_draft, open_run_directory, plan_run, resolve_output_dir
from hydraloop.launch.processes import TerminationHandler
from hydraloop.launch.rank_training import Training


@dataclass
class RunStarter:
    """Starts the runs of a command line. A run imports torch."""

    reports: Reports
    peers: Peers
    """The other ranks, if this process is one of several."""

    def run(self, draft: Draft, arguments: Sequence[str]) -> None:
        """Run a single run: in this process, or in ranks that this process starts.

        Args:
            draft: of the run.
            arguments: of the command line.

        Raises:
            UserError: the run cannot be started here.
            BaseException: as `train`.
        """
        cfg = draft.cfg
        os.environ.update(variables(draft.overrides))
        checks.check(cfg)
        if cfg.detach and not torchrun.is_ours():
            detach.check()
            with ExitStack() as lock, hydra_config(cfg):
                directory = plan_run(draft, lock).run_dir
            detach.start(draft, "hydra.run.dir", directory, detach.RUN_LOG)
        with ExitStack() as locks, hydra_config(cfg):
            if checks.starts_ranks(cfg):
                self.start_ranks(cfg, environment.script()[1:], arguments)
            else:
                self.train(cfg, self._plan(draft, locks))

    def _plan(self, draft: Draft, locks: ExitStack) -> RunPlan:
        """Return the plan of a single run: rank 0's, if this process is one of several ranks."""
        if torchrun.rank() > 0:
            return self.peers.follow(draft.cfg, lambda plan: of_draft(plan, draft))
        return self.peers.lead(draft.cfg, plan_run(draft, locks, self.peers.earlier(draft.cfg.resume)))

    def train(self, cfg: DictConfig, plan: RunPlan) -> None:
        """Train in this process.

        Args:
            cfg: of the plan, with the node `hydra`.

        Raises:
            BaseException: the error of the run. It is in `result.json`, and was shown by `reports`.
        """
        if torchrun.rank() > 0:
            rank_training.redirect_output(plan.run_dir, torchrun.rank(), cfg.hydra.verbose)
        else:
            open_run_directory(cfg, plan)
        self.train_by(plan)

    def train_by(self, plan: RunPlan) -> None:
        """Train. Errors: as of `train`."""
        result = ResultFile(plan.run_dir, plan.attempt)

        def close(ended: Ended) -> None:
            if torchrun.reports():
                self._close(ended, plan, result)

        def last(failure: Failure) -> None:
            self.peers.tell(failure)
            close(Ended.by(failure))

        if not torchrun.is_several():
            ended = _train_alone(plan, close)
        elif (failure := rank_training.train(plan, last)) is not None:
            self.peers.tell(failure)
            ended = Ended.by(failure)
            close(ended)
        elif torchrun.rank() > 0:
            return
        else:
            ended = Ended.with_result(plan.run_dir)
            close(ended)
        if ended.error is not None:
            raise ended.error

    def start_ranks(
        self,
        cfg: DictConfig,
        command: Sequence[str],
        arguments: Sequence[str],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start ranks that train, and wait for them.

        Args:
            cfg: with the node `hydra`; interpolations of `${hydra:…}` resolve.
            command: the script, as an argument of Python.
            arguments: of the script.
            variables: to add to the environment of the ranks.

        Raises:
            BaseException: as of `train`.
        """
        ended, start = elastic.launch(cfg.distributed, command, arguments, variables or {})
        if start is None:  # the process that has started rank 0 reports
            sys.exit(_exit_code(ended.error))
        if not start.run_dir:
            raise ended.error or RuntimeError("the ranks have trained nothing")
        paths: dict[str, Any] = {key: path and Path(path) for key, path in asdict(start).items() if key != "result"}
        plan = RunPlan(cfg=cfg, **paths)
        result = ResultFile(plan.run_dir, plan.attempt, start.result)
        if isinstance(ended.error, RankError) and ended.error.was_killed and result.is_complete:
            ended = Ended.with_result(plan.run_dir)  # the rank was killed after that
        if ended.error is not None:
            resolve_output_dir(cfg, plan)
            console.set_up(cfg.hydra.verbose, plan.run_dir / LOG)
            self._close(ended, plan, result)
            raise ended.error

    def _close(self, ended: Ended, plan: RunPlan, result: ResultFile) -> None:
        """Report how a run has ended, and write it into `result.json` unless the run has done so."""
        if ended.error is None:
            return
        if isinstance(ended.error, Requeue):
            if slurm.is_submitted() and candidates(*checkpoint_folders(plan.run_dir))[:1] == [plan.checkpoint]:
                ended.error.code = 128 + SIGTERM  # it has made no progress, and would repeat forever
            self.reports.end_job(ended.error, in_summary=True)
            return
        trace = ended.error.trace if isinstance(ended.error, RankError) else None
        self.reports.end_job(ended.error, trace=trace, in_summary=result.has(ended.error))
        if isinstance(ended.error, KeyboardInterrupt) and result.is_complete:
            return  # a signal at the end does not change how the run has ended
        result.set_error(ended.error)
        if not ended.trained:
            result.put_back()


def _exit_code(error: BaseException | None) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 128 + (error.number if isinstance(error, Terminated) else SIGINT)
    return 0 if error is None else 1


def _train_alone(plan: RunPlan, close: Callable[[Ended], None]) -> Ended:
    """Build and train in a single process. SIGTERM and SIGHUP end the run as Ctrl-C does, unless they preempt it.

    Args:
        close: called once when the run has ended. If it has failed, or was interrupted or preempted, no signal
            interrupts this call. Called from another thread if the main thread does not return within
            `termination.GRACE` seconds after a signal.
    """
    training = Training()

    def last(number: int) -> None:
        result = None if training.engine is None else training.engine.outcome.result
        if result is None or result.error is not None:  # a run that has finished keeps its result
            error = None if training.engine is None else training.engine.error
            close(Ended(error=error or Terminated(number), trained=training.has_trained()))

    handler = TerminationHandler(last, launched=torchrun.is_launched())
    handler.is_closing, handler.is_saving = training.is_closing, training.is_saving
    handler.start()
    torchrun.handles_signals.set()
    try:
        with uncollected():
            from hydraloop.engine.distributed.comm import Distributed
            from hydraloop.launch.build import build  # imports torch

        training.engine = build(plan, Distributed())
        training.engine.train()
        ended = Ended.with_result(plan.run_dir)
    except BaseException as error:
        training.is_over = True
        # After a preemption, the earlier handler of the signal may raise anything, and nothing has failed.
        result = training.engine.outcome.result if training.is_saving() else None
        saved = result is not None and result.status == "interrupted"
        ended = Ended.with_result(plan.run_dir) if saved else Ended(error=error, trained=training.has_trained())
        close(ended)
    else:
        close(ended)
    finally:
        handler.stop()
    if handler.received and not isinstance(ended.error, KeyboardInterrupt):  # while the run was closing
        return Ended(error=Terminated(handler.received))
    return ended
