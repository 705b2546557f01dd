"""Starts the ranks of a job on this machine with torch's elastic launcher, and waits until all have ended."""

from __future__ import annotations

import contextlib
import logging
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from hydraloop.errors import UserError
from hydraloop.launch import rank_log
from hydraloop.launch.failure import DONE, Ended, Failure, RankError, Terminated, cause
from hydraloop.launch.job import Job
from hydraloop.run.uncollected import uncollected

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that torch's launcher handles. It does not restore the handlers."""


def launch(job: Job, *, processes: int, max_restarts: int = 0) -> Ended:
    """Run the job on several ranks. When this returns, all of them have ended.

    Args:
        processes: number of ranks.
        max_restarts: how often all ranks are started again after one has failed. After a `UserError` they are not: a
            restart would repeat it.
    """
    ended = _launch(job, processes)
    for restart in range(1, max_restarts + 1):
        if ended.error is None or isinstance(ended.error, (UserError, KeyboardInterrupt)):
            break
        try:
            job, trained = job.restarted(), ended.trained
        except UserError as error:  # all checkpoints are damaged
            return replace(ended, error=error)
        log.warning("restart %d from %s, after: %s", restart, job.checkpoint or "the beginning", ended.error)
        ended = _launch(job, processes)
        ended = replace(ended, trained=ended.trained or trained)
    return ended


def _launch(job: Job, processes: int) -> Ended:
    # Only the user can read the folder and the files in it. A rank removes it if this process is killed.
    with tempfile.TemporaryDirectory(prefix="hydraloop-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "job.json").write_text(job.to_json(), encoding="utf-8")
        error: BaseException | None = None
        exit_codes: dict[int, int] = {}
        try:
            exit_codes, number = _run(processes, name, "-P", str(Path(__file__).with_name("worker.py")), name)
            if number:
                error = KeyboardInterrupt() if number == signal.SIGINT else Terminated(number)
        except KeyboardInterrupt as told:  # before the launcher handled signals
            error = told
        failures = _failures(job, folder, processes, exit_codes)
        if error is None and not failures:
            return Ended.with_result(Path(job.run_dir))
        return Ended(error=error or _error(failures), trained=any(failure.trained for failure in failures))


def run_module(arguments: Sequence[str], processes: int) -> int:
    """Run `python -m …` on several ranks, which print their errors themselves. Returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="hydraloop-", ignore_cleanup_errors=True) as name:
        exit_codes, number = _run(processes, name, "-m", *arguments)
    for rank, code in exit_codes.items():
        if code < 0 and code != -signal.SIGTERM:  # which the launcher sends after another failure
            print(f"error: rank {rank} was ended by signal {-code}", file=sys.stderr)
    return 128 + number if number else int(bool(exit_codes))


def _run(processes: int, folder: str, *arguments: str) -> tuple[dict[int, int], int]:
    """Run Python on several ranks. Returns the exit codes other than 0 by rank, and the signal that ended them or 0."""
    with uncollected():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher import api

    config = api.LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=processes,
        run_id=secrets.token_hex(8),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",  # a free port
        local_addr="127.0.0.1",  # the machine's name may not resolve
        max_restarts=0,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        # A signal that is ignored (nohup) stays ignored.
        signals_to_handle=",".join(one.name for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN),
    )
    try:
        with _around_launcher():
            api.elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as failed:
        return {rank: process.exitcode for rank, process in failed.failures.items()}, 0
    except SignalException as told:
        return {}, int(told.sigval)
    return {}, 0


def _failures(job: Job, folder: Path, processes: int, exit_codes: dict[int, int]) -> list[Failure]:
    """Return the failures of all ranks. `exit_codes` has those other than 0, by rank."""
    # Also of ranks that reported after the launcher had noticed that another one has failed.
    reported = {path.parent.name: path for path in folder.glob("*/attempt_0/*/error.json")}
    done = {path.parent.name for path in folder.glob(f"*/attempt_0/*/{DONE}")}
    failures = [Failure.from_json(path.read_bytes()) for path in reported.values()]
    for rank in range(processes):
        code = exit_codes.get(rank, 0)
        if str(rank) not in reported and (code or str(rank) not in done):
            failures.append(Failure.of_exit(rank, code, rank_log.path(job, rank)))
    return failures


def _error(failures: list[Failure]) -> BaseException:
    found = cause(failures)
    if found.kind == "signal":  # another process sent it to a rank: the job has failed, and a sweep continues
        return RankError(found.message)
    return found.error()


@contextlib.contextmanager
def _around_launcher() -> Iterator[None]:
    """Silence torch's launcher, and restore the signal handlers after it."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())  # without any handler, Python would print warnings
    logger.propagate = False
    handlers = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
