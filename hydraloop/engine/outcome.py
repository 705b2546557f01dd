"""Outcome: how a run begins and ends. Closing hooks are called after an error, too, and `result.json` is written."""

from __future__ import annotations

import logging
import math
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from hydraloop.engine.batches import Batches
from hydraloop.engine.evaluator import Evaluator
from hydraloop.engine.loaders import end_workers
from hydraloop.engine.requests import Requests
from hydraloop.engine.run_parts import Run
from hydraloop.engine.save_and_restore import Checkpoints
from hydraloop.engine.summary import Report
from hydraloop.errors import UserError, interrupt
from hydraloop.files.checkpoint_files import END_UNWRITTEN
from hydraloop.files.environment import versions
from hydraloop.files.lock import RunLock
from hydraloop.files.metrics_log import FILENAME, count
from hydraloop.files.result import Objective, Result, Status, describe, preemption, signal_of

log = logging.getLogger(__name__)


class Outcome:
    """The error, the status and the result of a run.

    Args:
        run: the parts of the run.
        batches: their workers end with the run.
        requests: why the run stops.
        evaluator: the metrics.
        checkpoints: what was saved, and whether the run has diverged.
    """

    def __init__(
        self,
        run: Run,
        batches: Batches,
        requests: Requests,
        evaluator: Evaluator,
        checkpoints: Checkpoints,
    ) -> None:
        self._run = run
        self._batches = batches
        self._requests = requests
        self._evaluator = evaluator
        self._checkpoints = checkpoints
        self.report = Report(run, batches, evaluator, checkpoints)
        self.error: BaseException | None = None
        """The error that ends the run, set before on_exception; None without an error."""
        self.result: Result | None = None
        """The contents of `result.json`, set before after_run; None until then."""

    @contextmanager
    def locked(self, lock: RunLock | None) -> Iterator[None]:
        """Lock the run directory in the body. Before it is locked, no file is written and no hook is called.

        The directory is created if it does not exist.

        Args:
            lock: of the run directory. None: the caller has acquired it, or no lock is needed.

        Raises:
            OSError: the directory cannot be created.
            UserError: there is no optimizer; or another process trains in the directory, and other ranks get a
                `PeerError`.
        """
        _ = self._run.optimizer  # raises if there is none
        if lock is None:
            self._run.run_dir.mkdir(parents=True, exist_ok=True)
            yield
            return
        try:
            lock.acquire()
        except UserError as error:
            self._run.ranks.abandon(error)
            raise
        try:
            yield
        finally:
            lock.release()

    def _begin(self, *, records_code: bool) -> None:
        """Begin a use of the engine: reset the error, the result and the requests of an earlier use."""
        self._run.progress.start_clock()
        if self.error is not None:
            self._run.messages.load_state_dict([], self._run.ranks)  # drop the losses since the last record
        self.error = None
        self.result = None
        self._checkpoints.loss_check.forget()
        self._requests.reset()
        if self._run.ranks.is_main:
            if records_code:
                self._checkpoints.record_code()
            log.info("%s", self.report.start())

    @contextmanager
    def lifecycle(self, *, trains: bool = True) -> Iterator[None]:
        """Call before_run before the body; write `result.json` after it, and call after_run.

        Args:
            trains: False for a validation or test without training, which is not the run's result.
        """
        self._begin(records_code=trains)
        try:
            with self._run.precision.active(), self.always_calling("after_run"):
                try:
                    with self._calling_on_exception():  # before `result.json` is written
                        self._evaluator.check_validation()
                        self._run.calls.before_run()
                        yield
                finally:
                    self._checkpoints.close()
                    if trains:
                        self._write_result()
        finally:
            self._batches.end()
            for loader in self._batches.loaders.by_key().values():
                end_workers(loader)
            if trains:
                self._end()

    def _end(self) -> None:
        """After after_run: write the result again if a closing hook has failed, and print the summary."""
        if (self.result is None or self.result.error is None) and self._failed_in_after_run():
            self._write_result()
        # A user's mistake, or another rank's error, is printed once, by the process that reports it.
        is_reported = isinstance(self.error, UserError) or self.failed_elsewhere() is not None
        if self._run.ranks.is_main and not is_reported:
            log.info("%s", self.report.end(self.result, self.error, self._run.progress.attempt_seconds))

    @contextmanager
    def always_calling(self, point: Literal["after_train", "after_run"]) -> Iterator[None]:
        """Call all hooks of a closing mount point after the body, also if the body or one of the hooks raises.

        The first error is raised. Later errors of closing hooks are logged with their tracebacks. Before the closing
        hooks, on_exception is called with the error of the body, which they read in `error`.
        """
        error_of_hook: BaseException | None = None
        try:
            with self._calling_on_exception():
                yield
        finally:
            for call in self._run.calls.one_by_one(point):
                try:
                    call()
                except BaseException as error:  # after an interrupt, the other hooks still close
                    if self.error is None:
                        self._fail(error)
                        error_of_hook = error
                    else:
                        log.error("while closing after the first error: %s", describe(error), exc_info=error)
            if error_of_hook is not None:
                raise error_of_hook

    @contextmanager
    def _calling_on_exception(self) -> Iterator[None]:
        """Call on_exception after an error in the body."""
        try:
            yield
        except BaseException as error:
            self._fail(error)
            raise

    def _fail(self, error: BaseException) -> None:
        """Call on_exception for the first error of the run, before any closing hook."""
        if self.error is not None:
            return
        self.error = error
        if "device-side assert" in str(error):
            error.add_note("An index is out of range, usually a label or a token: engine.device=cpu names it.")
        self._run.ranks.abandon(error)  # before any hook, so that no hook waits for the other ranks
        for call in self._run.calls.one_by_one("on_exception"):
            try:
                call(error)
            except BaseException as error_of_hook:  # as in `always_calling`
                log.error("in on_exception: %s", describe(error_of_hook), exc_info=error_of_hook)

    # The result. -----------------------------------------------------------------------------------------------------

    def check_saved(self) -> None:
        """Refuse to end a run as preempted if its end was not saved, or as finished if its last file was not written.

        Raises:
            KeyboardInterrupt: a signal has preempted the run; on every rank, as without preemption.
            UserError: on every rank.
        """
        preempted_by = self._requests.preempted_by
        failed_path = self._checkpoints.failed_path
        is_saved = self._run.progress.iteration <= self._checkpoints.saved_iteration
        if is_saved or (preempted_by is None and failed_path is None):
            return
        if failed_path is not None:
            problem = f"{failed_path} {END_UNWRITTEN}"
            remedy = "Make space, and train again from the last checkpoint."
        else:
            problem = "the run has no checkpoint hook: the end of training is lost"
            remedy = "Add the hook `checkpoint`, and train again."
        if preempted_by is not None and preempted_by in signal.Signals.__members__:
            if self._run.ranks.is_main:
                log.warning("%s\n  %s", problem, remedy)
            raise interrupt(signal.Signals[preempted_by])
        raise UserError(problem, key="default_hooks.checkpoint", remedy=remedy)

    def failed_elsewhere(self) -> str | None:
        """Return the error of another rank, if that rank failed before this rank; otherwise None.

        This rank may not have noticed it: at the end of a run, no rank waits for the others.
        """
        first = self._run.ranks.first_failure()
        if first is None or first[0] == self._run.ranks.rank:
            return None
        if isinstance(self.error, KeyboardInterrupt | None) and signal_of(first[1]):
            return None  # all ranks have got the signal
        return f"rank {first[0]}: {first[1]}"

    def _failed_in_after_run(self) -> bool:
        """Return whether a closing hook of any rank has failed. A signal does not count: the run has ended."""
        first = self._run.ranks.first_failure()
        if first is not None:
            return not signal_of(first[1])
        return self.error is not None and not isinstance(self.error, KeyboardInterrupt)

    def _status(self) -> tuple[Status, str | None]:
        """Return the status, and the error as text."""
        elsewhere = self.failed_elsewhere()
        if elsewhere is not None:
            return "failed", elsewhere
        if self.error is not None:
            interrupted = isinstance(self.error, KeyboardInterrupt) or self._run.ranks.orphaned
            return "interrupted" if interrupted else "failed", describe(self.error)
        if self._requests.preempted_by is not None:
            return "interrupted", None
        if self._requests.stop_reason is not None and not self._run.progress.is_complete:
            return "stopped", None
        return "finished", None

    def _objective(self) -> Objective | None:
        """Return the value of the run that sweeps compare; nothing else decides what it is.

        It is the value of the best validation. If it is not known which values are good, it is the last value. It is
        NaN if the run ends because of its loss, also without a validation, and if no validation was finite.
        """
        validations = self._evaluator.validations
        name, higher = validations.objective
        rule: Literal["greater", "less"] | None = None
        if higher is not None:
            rule = "greater" if higher else "less"
        if self.error is not None and self._checkpoints.loss_check.diverged:
            return Objective(name, rule, math.nan, self._run.progress.iteration)
        if validations.best is not None:
            best = validations.best
            return Objective(best.metric, rule, best.value, best.iteration)
        if name not in validations.metrics:
            return None
        return Objective(name, rule, validations.comparable[name], self._run.progress.last_validation)

    def _write_result(self) -> None:
        """Set `result` and write it on rank 0. After an error of the run, an error in writing is only logged."""
        requests = self._requests
        validations = self._evaluator.validations
        requests.ignore_signals()
        status, error = self._status()
        reason = requests.stop_reason if status == "stopped" else None
        if error is None and status == "interrupted":
            reason = preemption(str(requests.preempted_by))
        self.result = Result(
            status=status,
            error=error,
            reason=reason,
            val_metrics=validations.metrics,
            test_metrics=self._evaluator.test_metrics,
            best=validations.best,
            objective=self._objective(),
            progress=self._run.progress.state_dict(),
            records=count(self._run.run_dir / FILENAME),
            seconds=self._run.progress.seconds,
            earlier_seconds=self._run.progress.earlier_seconds,
            hook_seconds={name: cell[0] for name, cell in self._run.calls.seconds.items()},
            versions=versions(),
            git=self._checkpoints.git,
        )
        if not self._run.ranks.is_main:
            return
        try:
            self.result.write(self._run.run_dir)
        except OSError as error_of_file:
            if self.error is None:
                raise
            log.error("result.json cannot be written: %s", describe(error_of_file))
