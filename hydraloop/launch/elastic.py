"""Starts the ranks of a run on this machine with torch's elastic launcher, and waits until all have ended.

Each rank runs the script with the arguments of this process. Rank 0 makes the plan, and has the lock of the run
directory. All ranks leave their errors to this process, which also sees signals that have ended a rank.
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
from typing import Any, Self

from hydra.core.utils import env_override

from hydraloop.errors import interrupt
from hydraloop.files import atomic
from hydraloop.files.result import FILENAME
from hydraloop.importing import uncollected
from hydraloop.launch import nodes, rank_training, torchrun
from hydraloop.launch.failure import Ended, Failure, cause
from hydraloop.launch.plan import RunPlan
from hydraloop.launch.private import masked_lists

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""The signals that torch's launcher handles. It does not restore the handlers."""
_PREEMPTING = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""The signals that preempt a run. They are passed on to its ranks: torch's launcher would kill these after 30 s."""
_STOPPED = "stopped"
"""In the folder of the ranks: the number of the first signal that was passed on."""


@dataclass(frozen=True, slots=True)
class Start:
    """What rank 0 tells the process that has started it: where the run is, at its first start."""

    run_dir: str = ""
    """Empty: rank 0 has made no plan yet."""
    checkpoint: str | None = None
    """Where the run has continued."""
    attempt: str | None = None
    """As in `RunPlan`."""
    result: str = ""
    """The `result.json` of an earlier attempt; empty without one."""

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """Return what rank 0 has written; None if rank 0 was started on another node."""
        file = folder / "start.json"
        return cls(**json.loads(file.read_text(encoding="utf-8"))) if file.exists() else None

    @classmethod
    def write(cls, plan: RunPlan | None = None) -> None:
        """Write it. Called on rank 0: when it starts, and when it has a plan."""
        folder = Path(os.environ[torchrun.NODE])
        found = cls.read(folder)
        if found is not None and (found.run_dir or plan is None):  # a restart
            return
        made = cls()
        if plan is not None:
            paths = {name: getattr(plan, name) for name in ("run_dir", "checkpoint", "attempt")}
            file = plan.run_dir / FILENAME
            result = file.read_text(encoding="utf-8") if file.exists() else ""
            made = cls(**{name: path and str(path.absolute()) for name, path in paths.items()}, result=result)
        atomic.write_text(folder / "start.json", json.dumps(asdict(made)))


def launch(
    options: Any, command: Sequence[str], arguments: Sequence[str], variables: Mapping[str, str]
) -> tuple[Ended, Start | None]:
    """Start ranks, and wait for them. After the failure of a rank, all are started again, unless it is a mistake.

    Args:
        options: `distributed`.
        command: the script, as an argument of Python.
        arguments: of the script. Secrets in them stay out of the command lines of the ranks.
        variables: to add to the environment of the ranks.

    Returns:
        How the ranks of this machine have ended, and what rank 0 has told. None: rank 0 was started on another node.

    Raises:
        UserError: Slurm has not started one process on each of the nodes.
    """
    processes = int(options.nproc_per_node)
    rendezvous = nodes.rendezvous(int(options.nnodes)) if options.nnodes > 1 else {}
    meeting = nodes.Meeting(rendezvous) if rendezvous else None
    shown, private = masked_lists({"arguments": [*arguments]})
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else 1
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, cores // processes)))  # or each rank would use all cores
    # Only the user can read the folder and the files in it. A rank removes it if this process is killed.
    with tempfile.TemporaryDirectory(prefix="hydraloop-", ignore_cleanup_errors=True) as name:
        variables = {
            "OMP_NUM_THREADS": threads,
            **variables,
            **private.variables(),
            torchrun.NODE: name,
            torchrun.OWNER: str(os.getpid()),
        }
        words, codes, number = [*command, *shown["arguments"]], dict[int, tuple[int, int]](), 0
        try:
            with env_override(variables), _passing_on(Path(name)):
                rendezvous["max_restarts"] = int(options.max_restarts)
                codes, number = run(processes, name, *words, passed_on=_PREEMPTING, **rendezvous)
        except KeyboardInterrupt as told:  # before there were ranks
            return Ended(error=told, trained=False), Start.read(Path(name))
        start = Start.read(Path(name))
        failures = _failures(Path(name), processes, codes, None if start is None else start.run_dir)
        if meeting is not None:
            failures = meeting.gathered(failures)
        return _ended(Path(name), failures, number), start


def _ended(folder: Path, failures: Sequence[Failure], number: int) -> Ended:
    """Return how the ranks have ended.

    Args:
        number: of the signal that has ended the launcher, or 0.
    """
    start, stopped = Start.read(folder), folder / _STOPPED
    if not number and not failures:
        return Ended.with_result(Path(start.run_dir)) if start is not None and start.run_dir else Ended()
    first = cause(failures) if failures else None
    if stopped.exists() and first is not None and first.kind not in ("mistake", "error"):  # it came too early
        number = number or int(stopped.read_text(encoding="ascii"))
    error = first.error() if first is not None and not number else interrupt(number)
    return Ended(error=error, trained=any(failure.trained for failure in failures))


def is_stopped() -> bool:
    """Whether the process that has started this rank was told to end, so that a restart must not train."""
    return torchrun.is_ours() and Path(os.environ[torchrun.NODE], _STOPPED).exists()


@contextlib.contextmanager
def _passing_on(folder: Path) -> Iterator[None]:
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

    def handle(number: int, frame: FrameType | None) -> None:
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
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in earlier.items():
            signal.signal(number, handler)


def run(
    processes: int, folder: str, *arguments: str, passed_on: Sequence[int] = (), **options: Any
) -> tuple[dict[int, tuple[int, int]], int]:
    """Run Python on several ranks.

    Args:
        folder: for the logs of torch's launcher.
        passed_on: the signals that the caller handles.
        options: of `LaunchConfig`.

    Returns:
        The rank and the exit code of each process whose exit code is not 0, by its number on this machine; and the
        signal that has ended the launcher, or 0.
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
        **{**alone, **options},
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
        return {process.local_rank: (rank, process.exitcode) for rank, process in failed.failures.items()}, 0
    except SignalException as told:
        return {}, int(told.sigval)
    return {}, 0


def _failures(folder: Path, processes: int, codes: dict[int, tuple[int, int]], run_dir: str | None) -> list[Failure]:
    """Return the failures of the ranks of this machine, after the last restart. `codes` are as `run` returns them."""
    starts = sorted(folder.glob("*/attempt_*"), key=lambda path: int(path.name.partition("_")[2]))
    failures = []
    for number in range(processes if starts else 0):
        files = starts[-1] / str(number)
        rank, code = codes.get(number, (number, 0))
        # Also of ranks that reported after the launcher had noticed that another one has failed.
        if (files / "error.json").exists():
            failures.append(Failure.from_json((files / "error.json").read_bytes()))
        elif code:
            log = Path(f"rank {rank}'s output") if not run_dir else rank_training.log_of_rank(Path(run_dir), rank)
            failures.append(Failure.of_exit(rank, code, log))
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
