"""Starts the ranks of a job on this machine with torch's elastic launcher, and waits until all have ended."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil

from hydraloop.launch import rank_log
from hydraloop.launch.failure import Ended, Failure, RankError, Terminated, cause
from hydraloop.launch.job import Job
from hydraloop.launch.termination import GRACE
from hydraloop.launch.training import sweep_value

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that torch's launcher handles. It does not restore the handlers."""


def launch(job: Job, *, processes: int, max_restarts: int = 0) -> Ended:
    """Run the job on several ranks. When this returns, no process of it is left.

    Args:
        processes: number of ranks.
        max_restarts: how often all ranks are started again after one has failed.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import api

    with tempfile.TemporaryDirectory(prefix="hydraloop-", ignore_cleanup_errors=True) as name:
        folder = Path(name)  # only its owner can read it and the files in it
        (folder / "job.json").write_text(job.to_json(), encoding="utf-8")
        config = api.LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=secrets.token_hex(8),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port
            local_addr="127.0.0.1",  # the machine's name may not resolve
            max_restarts=max_restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),
            # A signal that is ignored (nohup) stays ignored.
            signals_to_handle=",".join(one.name for one in _SIGNALS if signal.getsignal(one) is not signal.SIG_IGN),
        )
        worker = str(Path(__file__).with_name("worker.py"))
        error: BaseException
        try:
            with _around_launcher(processes), _none_left(folder):
                api.elastic_launch(config, sys.executable)("-P", worker, str(folder))
            return Ended(sweep_value(Path(job.run_dir)))
        except ChildFailedError as failed:
            error = _error(failed.failures, job)
        except SignalException as told:
            error = KeyboardInterrupt() if told.sigval == signal.SIGINT else Terminated(told.sigval)
        except KeyboardInterrupt as told:  # before the launcher handled signals
            error = told
        of_rank_0 = folder.glob("elastic/*/attempt_*/0/error.json")
        return Ended(error=error, trained=any(Failure.from_json(path.read_bytes()).trained for path in of_rank_0))


def _error(processes: Mapping[int, Any], job: Job) -> BaseException:
    """Return the error of the rank that made the job fail.

    Args:
        processes: torch's `ProcessFailure` of each rank that failed.
    """
    failures = []
    for rank, process in processes.items():
        if "kind" in process.error_file_data:
            failures.append(Failure(**process.error_file_data))
        else:
            log = os.path.relpath(rank_log.path(job, rank))
            failures.append(Failure.of_exit(rank, process.exitcode, log))
    found = cause(failures)
    assert found is not None, "torch raises ChildFailedError only with a failure"
    if found.kind == "signal":  # another process sent it to a rank: the job has failed, and a sweep continues
        return RankError(found.message)
    return found.error()


@contextlib.contextmanager
def _around_launcher(processes: int) -> Iterator[None]:
    """Set the environment of the ranks and silence torch's launcher. Then restore both, and the signal handlers."""
    environment, handlers = dict(os.environ), {number: signal.getsignal(number) for number in _SIGNALS}
    threads = max(1, len(os.sched_getaffinity(0)) // processes) if sys.platform == "linux" else 1
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # otherwise each rank would use all cores
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # no message for each connection to a rank that has ended
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed")]
    loggers = [logger for logger in map(logging.getLogger, names) if not logger.disabled]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger in loggers:
            logger.disabled = False
        for number, handler in handlers.items():
            if handler is not None and signal.getsignal(number) is not handler:
                signal.signal(number, handler)
        os.environ.clear()
        os.environ.update(environment)


@contextlib.contextmanager
def _none_left(folder: Path) -> Iterator[None]:
    """Then kill the ranks that are left because a second signal has interrupted the launcher."""
    try:
        yield
    finally:
        left = []
        for process in psutil.Process().children():
            with contextlib.suppress(psutil.Error):
                if str(folder) in process.cmdline():
                    process.kill()
                    left.append(process)
        psutil.wait_procs(left, timeout=GRACE)
