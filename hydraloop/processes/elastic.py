"""Starts the ranks of a job on this machine with torch's elastic launcher, and waits until all have ended."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any

import psutil
from hydra.core.utils import env_override

from hydraloop.errors import UserError, interrupt
from hydraloop.plan import RunPlan
from hydraloop.platforms import signals
from hydraloop.processes import rank_log
from hydraloop.processes.failure import DONE, Ended, Failure, cause
from hydraloop.processes.private import Private
from hydraloop.run_files.uncollected import uncollected

log = logging.getLogger(__name__)

_SIGNALS = signals("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
"""The signals that torch's launcher handles. It does not restore the handlers."""
PREEMPTING = signals("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
"""The signals that preempt a job. They are passed on to its ranks: torch's launcher would kill these after 30 s."""


def launch(plan: RunPlan) -> Ended:
    """Run a job on the ranks that its config asks for. When this returns, all of them have ended.

    After the failure of a rank, all ranks are started again, at most `distributed.max_restarts` times. After a
    `UserError` they are not: a restart would repeat it.

    Raises:
        UserError: an interpolation does not resolve.
    """
    private = Private.of(plan)  # what the text of the plan does not have
    ended = _launch(plan, private)
    for restart in range(1, plan.cfg.distributed.max_restarts + 1):
        if ended.error is None or isinstance(ended.error, (UserError, KeyboardInterrupt)):
            break
        try:
            plan, trained = plan.restarted(), ended.trained
        except UserError as error:  # all checkpoints are damaged
            return replace(ended, error=error)
        log.warning("restart %d from %s, after: %s", restart, plan.checkpoint or "the beginning", ended.error)
        ended = _launch(plan, private)
        ended = replace(ended, trained=ended.trained or trained)
    return ended


def _launch(plan: RunPlan, private: Private) -> Ended:
    processes = plan.cfg.distributed.nproc_per_node
    # Only the user can read the folder and the files in it. A rank removes it if this process is killed.
    with tempfile.TemporaryDirectory(prefix="hydraloop-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        (folder / "plan.json").write_text(plan.to_json(), encoding="utf-8")
        error: BaseException | None = None
        exit_codes: dict[int, int] = {}
        try:
            worker = str(Path(__file__).with_name("worker.py"))
            with env_override(private.variables()), passing_on(name) as passed_on:
                exit_codes, number = run(processes, name, "-P", worker, name, str(os.getpid()), passed_on=PREEMPTING)
            error = interrupt(number) if number else None
        except KeyboardInterrupt as told:  # before there were ranks
            error = told
        failures = _failures(plan.run_dir, folder, processes, exit_codes)
        if error is None and not failures:
            return Ended.with_result(plan.run_dir)
        if error is None and passed_on and cause(failures).kind not in ("mistake", "error"):  # it came too early
            error = interrupt(passed_on[0])
        return Ended(error=error or cause(failures).error(), trained=any(failure.trained for failure in failures))


def run_module(arguments: Sequence[str], processes: int) -> int:
    """Run `python -m …` on several ranks, which print their errors themselves. Returns the exit code."""
    with tempfile.TemporaryDirectory(prefix="hydraloop-", ignore_cleanup_errors=True) as name:
        exit_codes, number = run(processes, name, "-m", *arguments)
    for rank, code in exit_codes.items():
        if code < 0 and code != -signal.SIGTERM:  # which the launcher sends after another failure
            print(f"error: rank {rank} was ended by signal {-code}", file=sys.stderr)
    return 128 + number if number else int(bool(exit_codes))


@contextlib.contextmanager
def passing_on(argument: str) -> Iterator[list[int]]:
    """In the body, pass on the signals that preempt a job to its ranks. Yields the numbers of those that have come.

    Args:
        argument: in the command line of each rank.
    """
    passed_on: list[int] = []

    def handle(number: int, frame: FrameType | None) -> None:
        ranks = [child for child in psutil.Process().children() if argument in _command_line(child)]
        if not ranks:
            raise interrupt(number)
        passed_on.append(number)
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                rank.send_signal(number)

    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in PREEMPTING if is_main}
    earlier = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    for number in earlier:
        signal.signal(number, handle)
    try:
        yield passed_on
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _command_line(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # it has ended
        return []


def run(
    processes: int, folder: str, *arguments: str, passed_on: Sequence[int] = (), **rendezvous: Any
) -> tuple[dict[int, int], int]:
    """Run Python on several ranks. Returns the exit codes other than 0 by rank, and the signal that ended them or 0.

    Args:
        folder: for the logs of torch's launcher.
        passed_on: the signals that the caller handles.
        rendezvous: options of `LaunchConfig` for several nodes.
    """
    with uncollected():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher import api

    alone = {
        "min_nodes": 1,
        "max_nodes": 1,
        "run_id": secrets.token_hex(8),
        "rdzv_endpoint": "localhost:0",  # a free port
        "local_addr": "127.0.0.1",  # the machine's name may not resolve
        "max_restarts": 0,
    }
    config = api.LaunchConfig(
        nproc_per_node=processes,
        rdzv_backend="c10d",
        monitor_interval=0.1,
        **(rendezvous or alone),
        logs_specs=DefaultLogsSpecs(log_dir=folder),
        # A signal that is ignored (nohup) stays ignored.
        signals_to_handle=",".join(
            one.name for one in _SIGNALS if one not in passed_on and signal.getsignal(one) is not signal.SIG_IGN
        ),
    )
    try:
        with _around_launcher():
            api.elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as failed:
        return {rank: process.exitcode for rank, process in failed.failures.items()}, 0
    except SignalException as told:
        return {}, int(told.sigval)
    return {}, 0


def _failures(run_dir: Path, folder: Path, processes: int, exit_codes: dict[int, int]) -> list[Failure]:
    """Return the failures of all ranks. `exit_codes` has those other than 0, by rank."""
    # Also of ranks that reported after the launcher had noticed that another one has failed.
    reported = {path.parent.name: path for path in folder.glob("*/attempt_0/*/error.json")}
    done = {path.parent.name for path in folder.glob(f"*/attempt_0/*/{DONE}")}
    failures = [Failure.from_json(path.read_bytes()) for path in reported.values()]
    for rank in range(processes):
        code = exit_codes.get(rank, 0)
        if str(rank) not in reported and (code or str(rank) not in done):
            failures.append(Failure.of_exit(rank, code, rank_log.path(run_dir, rank)))
    return failures


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
