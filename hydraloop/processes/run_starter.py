"""Starts a run: makes its plan, and trains by it in this process, or in several. Reports its error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from signal import SIGTERM

from hydraloop import json_answers
from hydraloop.cli.error_reports import Reports
from hydraloop.cli.hydra_job import as_job
from hydraloop.errors import Terminated
from hydraloop.plan import Draft, RunPlan, plan_run
from hydraloop.processes import checks, elastic, nodes, slurm, torchrun
from hydraloop.processes.detach import detached
from hydraloop.processes.failure import Ended, RankError, Requeue
from hydraloop.processes.rank_training import Training
from hydraloop.processes.termination_signals import TerminationHandler
from hydraloop.run_files.checkpoint_files import candidates
from hydraloop.run_files.result import Result, ResultFile
from hydraloop.run_files.run_directory import checkpoint_folders
from hydraloop.run_files.uncollected import uncollected
from hydraloop.validate.config import hydra_config


@dataclass
class RunStarter:
    """Starts the runs of a command line. A run imports torch."""

    reports: Reports
    leader: torchrun.Leader
    """Tells the other ranks of a torchrun what to train."""
    on_build: Callable[[int], None] = lambda iterations: None
    """Called before training with the iterations of the whole run, if one process trains."""

    def run(self, draft: Draft, name: str) -> None:
        """Choose the directory of a single run and lock it, make the plan, and train by it; or start ranks that do so.

        Args:
            draft: of the run.
            name: of the primary config.

        Raises:
            UserError: the run cannot be started here.
            BaseException: as `train`.
        """
        if draft.cfg.distributed.nnodes > 1 and not torchrun.is_several():
            sys.exit(nodes.launch(draft.cfg.distributed, draft.overrides))
        background = detached() if draft.cfg.detach else None
        checks.check(draft.cfg)
        with ExitStack() as locks, hydra_config(draft.cfg):
            plan = plan_run(draft, locks, torchrun.earlier(draft.cfg.resume))
            with as_job(draft.cfg, plan, name) as job:
                if background is not None:
                    background.take_over(plan.run_dir)
                job.return_value = self.train(plan)
        if json_answers.asked():
            result = Result.read(plan.run_dir)
            json_answers.write("train", {"directory": plan.run_dir, "result": result and asdict(result)})

    def train(self, plan: RunPlan) -> float | None:
        """Train in this process, or in several.

        Returns:
            What a sweep optimizes: the best, else the last, validation.

        Raises:
            BaseException: the error of the run. It is in `result.json`, and was shown by `reports`.
        """
        self.reports.start_job()
        result = ResultFile(plan.run_dir, plan.attempt)

        def close(ended: Ended) -> None:
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

        if checks.several(plan.cfg):
            ended = self._train_ranks(plan, close)
            if isinstance(ended.error, RankError) and ended.error.was_killed and result.is_complete:
                ended = Ended.with_result(plan.run_dir)  # the rank was killed after that
            close(ended)
        else:
            ended = _train_alone(plan, close, self.on_build)
        if ended.error is not None:
            raise ended.error
        return ended.value

    def _train_ranks(self, plan: RunPlan, close: Callable[[Ended], None]) -> Ended:
        """Train with the other ranks of the torchrun that this process is part of, or start the ranks."""
        try:
            if torchrun.is_several():
                return self.leader.lead(plan, close)
            return elastic.launch(plan)
        except BaseException as error:
            return Ended(error=error, trained=False)


def _train_alone(plan: RunPlan, close: Callable[[Ended], None], on_build: Callable[[int], None]) -> Ended:
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
    try:
        with uncollected():
            from hydraloop.builder import build  # imports torch
            from hydraloop.engine.distributed.comm import Distributed

        if torchrun.is_launched():
            torchrun.remember(plan)
        training.engine = build(plan, Distributed())
        on_build(training.engine.max_iters)
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
