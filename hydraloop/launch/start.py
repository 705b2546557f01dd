"""Starts a run: makes its plan, trains in this process or starts ranks, and reports how the run has ended."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from signal import SIGTERM
from typing import NoReturn

from omegaconf import DictConfig

from hydraloop.config.checks import Draft, hydra_config
from hydraloop.config.hydra_keys import variables
from hydraloop.files import console, environment
from hydraloop.files.checkpoint_files import candidates
from hydraloop.files.error_reports import Reports
from hydraloop.files.result import ResultFile
from hydraloop.files.run_directory import checkpoint_folders
from hydraloop.launch import detach, slurm, start_ranks, torchrun, train_in_process
from hydraloop.launch.exit import Preempted, exit_code
from hydraloop.launch.failure import Failure, RankError, RunEnd
from hydraloop.launch.other_ranks import Peers
from hydraloop.launch.plan import LOG, RunPlan, open_run_directory, plan_of_draft, plan_run, set_output_dir


@dataclass
class RunStarter:
    """Starts the runs of a command line. A run imports torch."""

    reports: Reports
    peers: Peers
    """The other ranks, if this process is one of several."""

    def run(self, draft: Draft, arguments: Sequence[str]) -> None:
        """Run a single run: in the background, in this process, or in ranks that this process starts.

        Args:
            draft: of the run.
            arguments: of the command line.

        Raises:
            UserError: the run cannot be started here.
            BaseException: the error of the run, as from `train`.
        """
        cfg = draft.cfg
        os.environ.update(variables(draft.overrides))
        torchrun.check_options(cfg)
        if cfg.detach and not torchrun.is_ours():
            self._start_in_background(draft)
        with ExitStack() as locks, hydra_config(cfg):
            if torchrun.starts_ranks(cfg):
                self.start_ranks(cfg, environment.script()[1:], arguments)
            else:
                self.train(cfg, self._plan(draft, locks))

    def _start_in_background(self, draft: Draft) -> NoReturn:
        detach.check()
        with ExitStack() as lock, hydra_config(draft.cfg):
            run_dir = plan_run(draft, lock).run_dir
        detach.start(draft, "hydra.run.dir", run_dir, detach.RUN_LOG)

    def _plan(self, draft: Draft, locks: ExitStack) -> RunPlan:
        """Return the plan of a single run: rank 0 makes it, and sends it to the other ranks."""
        if torchrun.rank() > 0:
            return self.peers.receive_plan(draft.cfg, lambda plan: plan_of_draft(plan, draft))
        return self.peers.send_plan(draft.cfg, plan_run(draft, locks, self.peers.restart_point(draft.cfg.resume)))

    def train(self, cfg: DictConfig, plan: RunPlan) -> None:
        """Train in this process.

        Args:
            cfg: of the plan, with the node `hydra`.

        Raises:
            BaseException: the error of the run. It is in `result.json`, and was shown by `reports`.
        """
        if torchrun.rank() > 0:
            train_in_process.redirect_output(plan.run_dir, torchrun.rank(), cfg.hydra.verbose)
        else:
            open_run_directory(cfg, plan)
        result = ResultFile(plan.run_dir, plan.attempt)

        def report(end: RunEnd) -> None:
            if torchrun.reports():
                self._report(end, plan, result)

        def report_failure(failure: Failure) -> None:
            self.peers.report_failure(failure)
            report(RunEnd.from_failure(failure))

        if not torchrun.is_several():
            end = train_in_process.train_alone(plan, report)
        elif (failure := train_in_process.train_as_rank(plan, report_failure)) is not None:
            end = RunEnd.from_failure(failure)
        elif torchrun.rank() == 0:
            end = RunEnd.from_result(plan.run_dir)
            report(end)
        else:
            return
        if end.error is not None:
            raise end.error

    def start_ranks(
        self,
        cfg: DictConfig,
        command: Sequence[str],
        arguments: Sequence[str],
        variables: Mapping[str, str] | None = None,
    ) -> None:
        """Start ranks that train, and wait for them. If rank 0 was started on another node, exit.

        Args:
            cfg: with the node `hydra`; interpolations of `${hydra:…}` resolve.
            command: the script, as an argument of Python.
            arguments: of the script.
            variables: to add to the environment of the ranks.

        Raises:
            BaseException: the error of the run, as from `train`.
        """
        end, started = start_ranks.launch(cfg.distributed, command, arguments, variables or {})
        if started is None:  # the process that has started rank 0 reports
            sys.exit(exit_code(end.error))
        if started.paths is None:
            raise end.error or RuntimeError("the ranks have trained nothing")
        plan = RunPlan.from_paths(cfg, started.paths)
        result = ResultFile(plan.run_dir, plan.attempt, started.earlier_result)
        if isinstance(end.error, RankError) and end.error.was_killed and result.is_complete:
            end = RunEnd.from_result(plan.run_dir)  # the rank was killed after that
        if end.error is not None:
            set_output_dir(cfg, plan)
            console.set_up(cfg.hydra.verbose, plan.run_dir / LOG)
            self._report(end, plan, result)
            raise end.error

    def _report(self, end: RunEnd, plan: RunPlan, result: ResultFile) -> None:
        """Show the error of a run, and write it into `result.json` unless the run has written it."""
        error = end.error
        if error is None:
            return
        if isinstance(error, Preempted):
            newest = candidates(*checkpoint_folders(plan.run_dir))[:1]
            if slurm.is_submitted() and newest == [plan.checkpoint]:
                error.code = 128 + SIGTERM  # the run has made no progress: requeued, it would repeat forever
            self.reports.end_job(error, in_summary=True)
            return
        trace = error.trace if isinstance(error, RankError) else None
        self.reports.end_job(error, trace=trace, in_summary=result.has(error))
        if isinstance(error, KeyboardInterrupt) and result.is_complete:
            return  # a signal at the end does not change how the run has ended
        result.set_error(error)
        if not end.trained:
            result.put_back()
