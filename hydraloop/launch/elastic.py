"""Starting a job's ranks on this machine with torch's elastic launcher, and waiting for how they end."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil

from hydraloop.launch import rank_files as files
from hydraloop.launch import rank_log
from hydraloop.launch.job import Job
from hydraloop.launch.outcome import Outcome, Terminated, cause
from hydraloop.launch.termination import GRACE

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Those that torch's launcher handles, and leaves its handlers for."""
_LAUNCHER = "torch.distributed"
"""Its loggers begin with this."""


def launch(job: Job, *, processes: int, max_restarts: int = 0) -> Outcome:
    """Run the job on several ranks. Nothing of it is left when this returns, whatever happens to the ranks.

    Args:
        processes: how many ranks.
        max_restarts: how often all of them are started again after one has failed.

    Returns:
        Rank 0's outcome, or that of the rank that made the job fail.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher import api

    with tempfile.TemporaryDirectory(prefix="hydraloop-", ignore_cleanup_errors=True) as name:
        folder = Path(name)  # readable by its owner only, and so is what is in it
        (folder / "job.json").write_text(job.to_json(), encoding="utf-8")
        config = api.LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=processes,
            run_id=secrets.token_hex(8),
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",  # a free port
            local_addr="127.0.0.1",  # not the machine's name, which may lead nowhere
            max_restarts=max_restarts,
            monitor_interval=0.1,
            logs_specs=DefaultLogsSpecs(log_dir=str(folder / "elastic")),
        )
        # What is ignored (nohup) stays ignored. An assignment, as torch 2.8 has no such option and handles them all.
        handled = [number.name for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
        config.signals_to_handle = ",".join(handled)
        worker = str(Path(__file__).with_name("worker.py"))
        exit_codes: dict[int, int] = {}
        told = 0
        with _around_launcher(processes), _none_left(folder):
            try:
                api.elastic_launch(config, sys.executable)("-P", worker, str(folder))
            except ChildFailedError as error:
                exit_codes = {int(rank): failure.exitcode for rank, failure in error.failures.items()}
            except SignalException as error:
                told = int(error.sigval)
            except KeyboardInterrupt as error:  # before it handles signals
                told = error.number if isinstance(error, Terminated) else int(signal.SIGINT)
        return _outcome(job, folder, processes, exit_codes, told)


def _outcome(job: Job, folder: Path, processes: int, exit_codes: dict[int, int], told: int) -> Outcome:
    attempts = [int(path.stem.split("-")[1]) for path in folder.glob("outcome-*.json")]
    by_rank = {outcome.rank: outcome for outcome in files.outcomes(folder, max(attempts, default=0))}
    trained = 0 in by_rank and by_rank[0].trained
    if told:
        error = KeyboardInterrupt() if told == signal.SIGINT else Terminated(told)
        return Outcome.of(error, 0, trained=trained)
    for rank in range(processes):
        if rank not in by_rank:
            log = os.path.relpath(rank_log.path(job, rank))
            by_rank[rank] = Outcome.of_death(rank, exit_codes.get(rank, 0), log)
    found = cause(by_rank.values()) or by_rank[0]
    if found.kind == "signal":  # somebody told a rank to end, not us: the job has failed, and the next one can start
        found = replace(found, kind="died", text=f"was ended by {signal.Signals(found.number).name}")
    return replace(found, trained=trained)


@contextlib.contextmanager
def _around_launcher(processes: int) -> Iterator[None]:
    """The environment the ranks get; and the launcher keeps quiet, since what it would say is said by us, once."""
    environment, handlers = dict(os.environ), {number: signal.getsignal(number) for number in _SIGNALS}
    threads = max(1, len(os.sched_getaffinity(0)) // processes) if sys.platform == "linux" else 1
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))  # else each rank would use all cores
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of each broken connection, when a rank has gone
    names = [name for name in logging.root.manager.loggerDict if name.startswith(_LAUNCHER)]
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
    """Kill the ranks the launcher has left, where a second signal has kept it from ending them."""
    try:
        yield
    finally:
        left = [process for process in psutil.Process().children() if _is_rank(process, folder)]
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=GRACE)


def _is_rank(process: Any, folder: Path) -> bool:
    try:
        return str(folder) in process.cmdline()
    except psutil.Error:
        return False
