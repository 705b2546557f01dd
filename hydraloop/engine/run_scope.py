"""How a run begins and ends: closing hooks are called after an error, too, and `result.json` is written."""

from __future__ import annotations

import logging
import math
import shlex
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from hydraloop.engine import sanity
from hydraloop.engine.checkpoint import save_load
from hydraloop.engine.checks import check_evaluable, check_lengths
from hydraloop.engine.device.seeding import cudnn_benchmark, with_states
from hydraloop.engine.loaders import end_workers, failed_worker
from hydraloop.engine.report.summary import format_start, format_summary
from hydraloop.engine.stages import Call
from hydraloop.errors import UserError, interrupt
from hydraloop.run import code_patch
from hydraloop.run.checkpoint_files import newest_intact
from hydraloop.run.directory import checkpoint_folders
from hydraloop.run.environment import resume_command, versions
from hydraloop.run.result import PREEMPTED, Objective, Result, Status, describe, signal_of

if TYPE_CHECKING:
    from hydraloop.engine.engine import Engine

log = logging.getLogger(__name__)


@contextmanager
def locked(engine: Engine) -> Iterator[None]:
    """Hold the lock of the run directory in the body. Until it is acquired, no file is written and no hook called.

    The directory is created if it does not exist.

    Raises:
        OSError: the directory cannot be created.
        UserError: there is no optimizer; or another process trains in the directory, and other ranks get a `PeerError`.
    """
    _ = engine.optimizer
    if engine.lock is None:
        engine.run_dir.mkdir(parents=True, exist_ok=True)
        yield
        return
    try:
        engine.lock.acquire()
    except UserError as error:
        engine.distributed.abandon(error)
        raise
    try:
        yield
    finally:
        engine.lock.release()


@contextmanager
def run(engine: Engine, *, write_result: bool) -> Iterator[None]:
    """Call before_run before the body, write `result.json` after it, and call after_run.

    Args:
        write_result: False for a validation or test without training, which is not the run's result.
    """
    start, main = perf_counter(), engine.distributed.is_main
    _forget_earlier_use(engine)
    engine.git = code_patch.record(engine.run_dir, Path.cwd()) if write_result and main else {}
    if main:
        log.info("%s", format_start(engine))
    try:
        kernels = cudnn_benchmark(engine.settings.benchmark)
        with kernels, _own_generators(engine), engine.precision.active(), always(engine, engine.stages.after_run):
            try:
                sanity.check(engine)
                for call in engine.stages.before_run:
                    call(engine)
                yield
            except BaseException as error:
                told = raised(engine, error)
                if told is not error:
                    raise told from error
                raise
            finally:
                engine._saver.close()
                if write_result:
                    _put_result(engine, perf_counter() - start)
    finally:
        for loader in engine.loaders.by_key().values():
            end_workers(loader)
        if main and engine.precision.skipped and engine.progress.optimizer_step == 0:
            log.warning(
                "precision=%s: all %d optimizer steps were skipped, so nothing was learned; use a smaller "
                "precision.init_scale or precision.loss_scale",
                engine.precision.name, engine.precision.skipped,
            )  # fmt: skip
        engine.stages.report_repeated()
        has_error = engine.result is None or engine.result.error is not None
        if not has_error and _failed_in_after_run(engine):
            _put_result(engine, perf_counter() - start)
        # A user's mistake, or another rank's error, is printed once, by the process that reports it.
        if write_result and main and not isinstance(engine.error, UserError) and _failed_elsewhere(engine) is None:
            log.info("%s", format_summary(engine, perf_counter() - start))


@contextmanager
def without_training(engine: Engine, split: Literal["val", "test"]) -> Iterator[None]:
    """Do in the body a validation or test that is not part of a training run, from before_run to after_run.

    Raises:
        UserError: there is no data for it.
    """
    check_evaluable(engine.loaders.val if split == "val" else engine.loaders.test, f"data.{split}")
    with run(engine, write_result=False):
        check_lengths(engine)
        save_load.load(engine)
        yield


@contextmanager
def _own_generators(engine: Engine) -> Iterator[None]:
    """In the body, draw from the engine's random generators; the caller's have their states back at the end."""
    if engine.generators is None:
        yield
        return
    states, engine.generators = engine.generators, None  # in use, if a hook evaluates in the body
    try:
        with with_states(states):
            yield
    finally:
        engine.generators = states


def _forget_earlier_use(engine: Engine) -> None:
    """Reset what an earlier use of the engine has left: its error, its stop, its open accumulation window."""
    if engine._optimizer is not None and (engine.error is not None or not engine.window_closed):
        engine._optimizer.zero_grad(set_to_none=True)  # an error after backward leaves gradients
    if engine._window is not None and not engine.window_closed:
        engine._window.discard()
    if engine.error is not None:
        engine.messages.load_state_dict([], engine.distributed)  # the loss of the error
    engine.error, engine.result, engine.window_closed = None, None, True
    engine.diverged = engine.precision.diverged = False
    engine.preempted_by, engine.requeue_at, engine.preemptible = None, math.inf, False
    engine._requests.forget_stop()


@contextmanager
def always(engine: Engine, closing: Sequence[Call]) -> Iterator[None]:
    """Call all closing hooks after the body, also if it raises or one of them raises.

    The first error is raised; later errors of closing hooks are logged with their tracebacks.
    """
    try:
        yield
    except BaseException as error:
        told = raised(engine, error)
        if told is not error:
            raise told from error
        raise
    finally:
        first: BaseException | None = None
        for call in closing:
            try:
                call(engine)
            except BaseException as late:  # after an interrupt, the other hooks still close
                if engine.error is None:
                    first = raised(engine, late)
                else:
                    log.error("while closing after the first error: %s", describe(late), exc_info=late)
        if first is not None:
            raise first


def raised(engine: Engine, error: BaseException) -> BaseException:
    """Call on_exception for the first error of the run, before any closing hook. Return the error to raise."""
    if engine.error is not None:
        return error
    error = failed_worker(error) or error
    engine.error = error
    engine.distributed.abandon(error)  # before any hook, so that no hook waits for the other ranks
    for call in engine.stages.on_exception:
        try:
            call(engine, error)
        except BaseException as another:  # as in `always`
            log.error("in on_exception: %s", describe(another), exc_info=another)
    return error


def _failed_elsewhere(engine: Engine) -> str | None:
    """Return the error of another rank that failed before this one; None if no rank has.

    This rank may not have noticed it: at the end of a run, no rank waits for the others.
    """
    first = engine.distributed.first_failure()
    if first is None or first[0] == engine.distributed.rank:
        return None
    if isinstance(engine.error, KeyboardInterrupt | None) and signal_of(first[1]):
        return None  # all ranks have got the signal
    return f"rank {first[0]}: {first[1]}"


def _failed_in_after_run(engine: Engine) -> bool:
    """Whether a closing hook of any rank has failed. A signal at that point does not change how the run has ended."""
    first = engine.distributed.first_failure()
    if first is not None:
        return not signal_of(first[1])
    return engine.error is not None and not isinstance(engine.error, KeyboardInterrupt)


def _objective(engine: Engine) -> Objective | None:
    """Return the value of the run that sweeps compare; nothing else decides what it is.

    It is the best or last value of the metric by which `checkpoint` or `runtime_info` compare validations. If they do
    not know which values of it are better, it is the last value of the first metric. It is NaN if the run ends because
    of its loss, also without a validation.
    """
    monitor: tuple[str, bool] | None = engine.messages.read("monitor")
    name = next(iter(engine.metric_names), "loss") if monitor is None else monitor[0]
    rule: Literal["greater", "less"] | None = None
    if monitor is not None:
        rule = "greater" if monitor[1] else "less"
    if engine.error is not None and (engine.diverged or engine.precision.diverged):
        return Objective(name, rule, math.nan, engine.progress.iteration)
    if engine.best is not None:
        return Objective(engine.best.metric, rule, engine.best.value, engine.best.iteration)
    if name not in engine.metrics:
        return None
    return Objective(name, rule, engine.metrics[name], engine.progress.last_validation)


def check_saved(engine: Engine) -> None:
    """Refuse to end a run as preempted if its end was not saved, or as finished if its last file was not written.

    Raises:
        KeyboardInterrupt: a signal has preempted the run; on every rank, as without preemption.
        UserError: on every rank.
    """
    by, unwritten = engine.preempted_by, engine.unwritten
    if engine.progress.iteration <= engine.saved_iteration or (by is None and unwritten is None):
        return
    why, remedy = "the run has no checkpoint hook", "Add the hook `checkpoint`"
    if unwritten is not None:
        why, remedy = f"{unwritten} could not be written, and no later file was", "Make space"
    why += ": the end of training is lost"
    if newest_intact(*checkpoint_folders(engine.run_dir)) is None:
        remedy += ", then start the run again in another directory: it has no checkpoint."
    else:
        remedy += f", then train the rest again: {shlex.join(resume_command(engine.run_dir))}"
    if by is not None and by in signal.Signals.__members__:
        if engine.distributed.is_main:
            log.warning("%s\n  %s", why, remedy)
        raise interrupt(signal.Signals[by])
    raise UserError(why, key="default_hooks.checkpoint", remedy=remedy)


def _reason(engine: Engine, status: Status) -> str | None:
    if engine.error is None and engine.preempted_by is not None and status == "interrupted":
        return f"{PREEMPTED}{engine.preempted_by}"
    return engine.stop_reason if status == "stopped" else None


def _put_result(engine: Engine, seconds: float) -> None:
    """Set `engine.result` and write it on rank 0. After an error of the run, an error in writing is only logged."""
    engine.preemptible = False
    complete = engine.progress.iteration >= engine.max_iters
    status: Status = "stopped" if engine.stopping and not complete else "finished"
    if engine.preempted_by is not None:
        status = "interrupted"
    error = _failed_elsewhere(engine)
    if error is not None:
        status = "failed"
    elif engine.error is not None:
        error = describe(engine.error)
        interrupted = isinstance(engine.error, KeyboardInterrupt) or engine.distributed.orphaned
        status = "interrupted" if interrupted else "failed"
    engine.result = Result(
        status=status,
        error=error,
        reason=_reason(engine, status),
        val_metrics=engine.metrics,
        test_metrics=engine.test_metrics,
        best=engine.best,
        objective=_objective(engine),
        progress=engine.progress.state_dict(),
        seconds=seconds,
        versions=versions(),
        git=engine.git,
    )
    if not engine.distributed.is_main:
        return
    try:
        engine.result.write(engine.run_dir)
    except OSError as late:
        if engine.error is None:
            raise
        log.error("result.json cannot be written: %s", describe(late))
