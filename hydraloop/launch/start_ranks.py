"""Starts the ranks of a run on this machine with torch's elastic launcher, and waits until all have ended.

Each rank runs the script with the arguments of this process. Rank 0 makes the plan, and has the lock of the run
directory. Each rank writes its error to a file for this process, which also sees the signals that have ended a rank.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

from hydra.core.utils import env_override

from hydraloop.errors import interrupt
from hydraloop.files import atomic
from hydraloop.files.result import FILENAME
from hydraloop.files.secrets import masked_lists
from hydraloop.importing import uncollected
from hydraloop.launch import slurm_nodes, torchrun
from hydraloop.launch.failure import Failure, RunEnd, cause
from hydraloop.launch.plan import RunPlan
from hydraloop.launch.train_in_process import log_of_rank

_OF_LAUNCHER = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that torch's launcher handles. It does not restore the handlers."""
_PREEMPTING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that preempt a run. They are passed on to its ranks: torch's launcher would kill these after 30 s."""
_STOPPED = "stopped"
"""File in the folder of the ranks: the number of the first signal that was passed on."""


@dataclass(frozen=True, slots=True)
class StartedRun:
    """What rank 0 writes for the process that has started it, at its first start."""

    paths: dict[str, str | None] | None = None
    """Those of the `RunPlan`; None before rank 0 has made a plan."""
    earlier_result: str = ""
    """The `result.json` of an earlier attempt; empty without one."""

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return what rank 0 has written; None if rank 0 was started on another node."""
        file = folder / "start.json"
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None

    @classmethod
    def write(cls, plan: RunPlan | None = None) -> None:
        """Write the file, unless an earlier start has written it. Called on rank 0, which makes its plan later."""
        folder = Path(os.environ[torchrun.NODE])
        earlier = cls.read(folder)
        if earlier is not None and (earlier.paths is not None or plan is None):
            return
        started = cls()
        if plan is not None:
            result = plan.run_dir / FILENAME
            started = cls(plan.paths(), result.read_text(encoding="utf-8") if result.exists() else "")
        atomic.write_text(folder / "start.json", json.dumps(asdict(started)))


class _LauncherEnd(NamedTuple):
    """How torch's launcher has ended."""

    exit_codes: Mapping[int, tuple[int, int]] = {}
    """The rank and the exit code of each process whose exit code is not 0, by its number on this machine."""
    signal: int = 0
    """The number of the signal that has ended the launcher; 0 without one."""


def launch(
    options: Any, command: Sequence[str], arguments: Sequence[str], variables: Mapping[str, str]
) -> tuple[RunEnd, StartedRun | None]:
    """Start ranks, and wait for them. After the failure of a rank, all are restarted, unless it is a user's mistake.

    Args:
        options: `distributed`.
        command: the script, as an argument of Python.
        arguments: of the script. Secrets in them stay out of the command lines of the ranks.
        variables: to add to the environment of the ranks.

    Returns:
        How the ranks of this machine have ended, and what rank 0 has written. None: rank 0 runs on another node.

    Raises:
        UserError: Slurm has not started one process on each of the nodes.
    """
    processes = int(options.nproc_per_node)
    rendezvous = slurm_nodes.rendezvous(int(options.nnodes)) if options.nnodes > 1 else {}
    exchange = slurm_nodes.FailureExchange(rendezvous) if rendezvous else None
    masked, secret_variables = masked_lists({"arguments": [*arguments]})
    # Only the user can read the folder and the files in it. A rank removes it if this process is killed.
    with tempfile.TemporaryDirectory(prefix="hydraloop-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        environment = {
            "OMP_NUM_THREADS": _threads(processes),
            **variables,
            **secret_variables,
            torchrun.NODE: name,
            torchrun.OWNER: str(os.getpid()),
        }
        try:
            with env_override(environment), _passing_signals_on(folder):
                config = {**rendezvous, "max_restarts": int(options.max_restarts)}
                launcher = _run_launcher(processes, folder, [*command, *masked["arguments"]], config)
        except KeyboardInterrupt as interruption:  # before there were ranks
            return RunEnd(error=interruption, trained=False), StartedRun.read(folder)
        started = StartedRun.read(folder)
        failures = _failures(folder, processes, launcher.exit_codes)
        if exchange is not None:
            failures = exchange.of_all_nodes(failures)
        return _run_end(folder, failures, launcher.signal), started


def _threads(processes: int) -> str:
    """Return the number of threads of a rank. Without a limit, each rank would use all cores."""
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    return os.environ.get("OMP_NUM_THREADS", str(max(1, cores // processes)))


def _run_end(folder: Path, failures: Sequence[Failure], number: int) -> RunEnd:
    """Return how the ranks have ended.

    Args:
        number: of the signal that has ended the launcher, or 0.
    """
    if not number and not failures:
        run_dir = _run_dir(folder)
        return RunEnd() if run_dir is None else RunEnd.from_result(run_dir)
    first = cause(failures) if failures else None
    stopped = folder / _STOPPED
    if stopped.exists() and first is not None and first.kind not in ("mistake", "error"):
        # The signal came before the ranks could handle it.
        number = number or int(stopped.read_text(encoding="ascii"))
    error = first.error() if first is not None and not number else interrupt(number)
    return RunEnd(error=error, trained=any(failure.trained for failure in failures))


def _run_dir(folder: Path) -> Path | None:
    """Return the run directory; None if rank 0 has made no plan, or runs on another node."""
    started = StartedRun.read(folder)
    return None if started is None or started.paths is None else Path(str(started.paths["run_dir"]))


def is_stopped() -> bool:
    """Return whether the process that has started this rank has got a signal, so that a restart must not train."""
    return torchrun.is_ours() and Path(os.environ[torchrun.NODE], _STOPPED).exists()


@contextlib.contextmanager
def _passing_signals_on(folder: Path) -> Iterator[None]:
    """In the body, pass on the signals that preempt a run to its ranks.

    Args:
        folder: of the ranks.
    """

    import psutil  # 10 ms, which commands without ranks do without

    def is_rank(process: psutil.Process) -> bool:
        try:
            return process.environ().get(torchrun.NODE) == str(folder)
        except psutil.Error:  # it has ended
            return False

    def pass_on(number: int, frame: FrameType | None) -> None:
        ranks = [child for child in psutil.Process().children() if is_rank(child)]
        if not ranks:
            raise interrupt(number)
        if not (folder / _STOPPED).exists():
            (folder / _STOPPED).write_text(str(int(number)), encoding="ascii")
        for rank in ranks:
            with contextlib.suppress(psutil.Error):
                rank.send_signal(number)

    is_main = threading.current_thread() is threading.main_thread()
    handlers = {number: signal.getsignal(number) for number in _PREEMPTING if is_main}
    earlier = {number: handler for number, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}
    for number in earlier:
        signal.signal(number, pass_on)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def _run_launcher(processes: int, folder: Path, arguments: Sequence[str], options: Mapping[str, Any]) -> _LauncherEnd:
    """Run Python on several ranks, and wait for them.

    Args:
        processes: number of ranks on this machine.
        folder: for the logs of torch's launcher.
        arguments: of Python.
        options: of `LaunchConfig`.
    """
    with uncollected():
        from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher import api

    on_this_machine = {
        "min_nodes": 1,
        "max_nodes": 1,
        "run_id": secrets.token_hex(8),
        "rdzv_endpoint": "localhost:0",  # a free port
        "local_addr": "127.0.0.1",  # the machine's name may not resolve
    }
    handled = [
        one.name
        for one in _OF_LAUNCHER
        if one not in _PREEMPTING and signal.getsignal(one) is not signal.SIG_IGN  # nohup: it stays ignored
    ]
    config = api.LaunchConfig(
        nproc_per_node=processes,
        rdzv_backend="c10d",
        monitor_interval=0.1,
        **{**on_this_machine, **options},
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),
        signals_to_handle=",".join(handled),
    )
    try:
        with _around_launcher():
            api.elastic_launch(config, sys.executable)(*arguments)
    except ChildFailedError as error:
        failed = error.failures.items()
        return _LauncherEnd(exit_codes={process.local_rank: (rank, process.exitcode) for rank, process in failed})
    except SignalException as error:
        return _LauncherEnd(signal=int(error.sigval))
    return _LauncherEnd()


def _failures(folder: Path, processes: int, exit_codes: Mapping[int, tuple[int, int]]) -> list[Failure]:
    """Return the failures of the ranks of this machine, after the last restart."""
    run_dir = _run_dir(folder)
    starts = sorted(folder.glob("*/attempt_*"), key=lambda path: int(path.name.partition("_")[2]))
    failures = []
    for number in range(processes if starts else 0):
        rank, code = exit_codes.get(number, (number, 0))
        # A rank may have reported after the launcher had noticed that another one has failed: it has no code.
        error = starts[-1] / str(number) / "error.json"
        if error.exists():
            failures.append(Failure.from_json(error.read_bytes()))
        elif code:
            log = Path(f"rank {rank}'s output") if run_dir is None else log_of_rank(run_dir, rank)
            failures.append(Failure.of_exit(rank, code, log))
    return failures


@contextlib.contextmanager
def _around_launcher() -> Iterator[None]:
    """Silence torch's launcher, and restore the signal handlers after it."""
    logger = logging.getLogger("torch.distributed.elastic")
    logger.addHandler(logging.NullHandler())  # without any handler, Python would print warnings
    logger.propagate = False
    handlers = {number: signal.getsignal(number) for number in _OF_LAUNCHER}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if signal.getsignal(number) is not handler:
                signal.signal(number, handler)
