"""Trains as one of the ranks that torchrun has started, or another launcher with the same environment variables.

Rank 0 does what a single process does: it composes and checks the config and creates the run directory. Then it sends
the plan to the other ranks through the store that all ranks share. They wait for it and read no config files. They
resolve secrets that are interpolated, and a config may name what their own `main()` trusts.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from hydraloop.errors import Terminated, UserError
from hydraloop.plan import RunPlan
from hydraloop.processes import rank_log
from hydraloop.processes.failure import REQUEUE, Ended, Failure
from hydraloop.processes.rank_training import train
from hydraloop.processes.termination_signals import TerminationHandler, leave
from hydraloop.processes.unloading import leave_before_unloading
from hydraloop.run_files.checkpoint_to_resume import Find, newest_checkpoint
from hydraloop.run_files.processes import is_alive, started
from hydraloop.run_files.uncollected import uncollected

NODE = "HYDRALOOP_NODE"
"""Variable of ranks: the folder of the process that has started the ranks of this node, see `nodes`."""
_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_WAIT = timedelta(minutes=30)
"""Timeout for rank 0's job, torch's own default: composing on a slow disk may take minutes."""
_CAUSE_WAIT = 10.0
"""Seconds that rank 0 waits for the failure of another rank after it has lost the connection."""
_ENDING_WAIT = timedelta(seconds=5)
"""Timeout for the store when the grace period is over: torchrun, which keeps the store, may have ended."""


def is_several() -> bool:
    """Whether this process is one of several ranks."""
    return all(name in os.environ for name in _NEEDED) and int(os.environ["WORLD_SIZE"]) > 1


def is_launched() -> bool:
    """Whether a launcher has started this process, even if it is the only one."""
    return is_several() or "TORCHELASTIC_RUN_ID" in os.environ


def is_ours() -> bool:
    """Whether `nodes.launch` has started this process as a rank."""
    return NODE in os.environ


def note_preempted() -> None:
    """Let the process that has started this rank exit with `REQUEUE`: no rank has failed."""
    Path(os.environ[NODE], str(REQUEUE)).touch()


def rank() -> int:
    """Return the rank of this process; 0 if it is the only one."""
    return int(os.environ["RANK"]) if is_several() else 0


def keep_quiet() -> None:
    """Silence torch's stack traces of each connection to a rank that has ended. Call it before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def local_world_size() -> int:
    """Return the number of ranks on this machine."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def attempt() -> int:
    """Return 0 for the first start, n for the n-th restart."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


# Rank 0. -------------------------------------------------------------------------------------------------------------


class Leader:
    """Rank 0: sends the plan to the other ranks, trains with them, and reports for all."""

    def __init__(self) -> None:
        self._has_sent = False
        self._ended: Ended | None = None
        self._launcher = os.getppid()

    def lead(self, plan: RunPlan, close: Callable[[Ended], None]) -> Ended:
        """Send the plan to the other ranks and train with them. Returns how the job ended.

        Signals are still handled when this has returned: torchrun sends one as soon as another rank has failed, when
        the error may not have been reported yet.

        Args:
            close: called from another thread if the main thread does not return within `termination.GRACE` seconds
                after a signal, for example from a collective without the other ranks.
        """
        store = _store()
        remember(plan)
        self._send(store, plan.to_json())

        def last(number: int) -> None:
            if self._ended is None:
                failure = Failure.of(Terminated(number), 0)
                with contextlib.suppress(RuntimeError, OSError):
                    failure = _cause(_store(_ENDING_WAIT), failure, plan.run_dir, self._launcher)
                close(Ended.by(failure))

        def has_lost() -> bool:  # then torchrun has sent the signal
            try:
                watched = _store(_ENDING_WAIT)
                return watched.check(["cause"]) or _killed(watched, plan.run_dir) is not None
            except (RuntimeError, OSError):  # torchrun has ended
                return True

        handler = TerminationHandler(last)
        handler.has_lost = has_lost
        failure = train(plan, 0, handler.start())
        if failure is None:
            self._ended = Ended.with_result(plan.run_dir)
        else:
            is_own = failure.kind in ("mistake", "error")
            self._ended = Ended.by(failure if is_own else _cause(store, failure, plan.run_dir, self._launcher))
        return self._ended

    def leave(self, code: int) -> None:
        """Let the other ranks end. If the job has failed, end this process at once."""
        if self._has_sent and code:
            leave(code)
        # torchrun ends the other ranks itself if this one fails.
        if not self._has_sent and (code == 0 or not _keeps_store()):
            with contextlib.suppress(RuntimeError, OSError):
                self._send(_store(), None)

    def _send(self, store: Any, job: str | None) -> None:
        self._has_sent = True
        store.set("job", json.dumps(job))


def _cause(store: Any, own: Failure, run_dir: Path, launcher: int) -> Failure:
    """Return the failure of the rank that failed first; rank 0's own if no other rank has failed by itself.

    Args:
        launcher: process ID of rank 0's parent at the start. When it has ended, the ranks end one after another.
    """
    until = time.monotonic() + _CAUSE_WAIT
    while True:
        try:
            if store.check(["cause"]):
                return Failure.from_json(store.get("cause"))
            killed = _killed(store, run_dir)
        except (RuntimeError, OSError):  # the process that keeps the store has ended
            was_ended = own.kind == "lost" and os.getppid() != launcher
            return Failure.of(Terminated(signal.SIGTERM), 0, trained=own.trained) if was_ended else own
        if killed is not None:
            return replace(killed, trained=own.trained)
        # A signal comes from torchrun. If another rank has failed, it did so before.
        if own.kind == "signal" or time.monotonic() > until:
            return own
        time.sleep(0.05)


def _killed(store: Any, run_dir: Path) -> Failure | None:
    """Return the failure of a rank that was killed on this machine: it has ended without a note in the store.

    Raises:
        RuntimeError: the process that keeps the store has ended.
    """
    for other in range(1, int(os.environ["WORLD_SIZE"])):
        if not store.check([f"began-{other}"]):
            continue
        host, pid, since, log_size = json.loads(store.get(f"began-{other}"))
        # Look at the process first: a rank writes its note before it ends.
        if host != socket.gethostname() or is_alive(pid, since) or store.check([f"ended-{other}"]):
            continue
        log = rank_log.path(run_dir, other)
        return Failure.killed(other, log, crash=rank_log.crash(log, log_size))
    return None


# The other ranks. ----------------------------------------------------------------------------------------------------


def follow() -> int:
    """Wait for rank 0's job and train. Returns the exit code. Prints nothing: rank 0 reports for all ranks."""
    finished = leave_before_unloading()
    try:
        store = _store()
        text = json.loads(store.get("job"))
    except (RuntimeError, OSError, KeyboardInterrupt):  # rank 0 has ended, or all ranks got a signal
        return 1
    if text is None:  # rank 0 trains nothing: it has printed something, or reported a mistake
        return 0
    plan = RunPlan.from_json(text)
    rank_log.configure(plan, rank())

    def last(number: int) -> None:
        print(f"ended by signal {number}: the grace period is over", file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError, OSError):
            _note(_store(_ENDING_WAIT), "ended", rank())

    handler = TerminationHandler(last).start()
    log_size = rank_log.path(plan.run_dir, rank()).stat().st_size
    _note(store, "began", rank(), socket.gethostname(), os.getpid(), started(os.getpid()), log_size)
    failure = train(plan, rank(), handler)
    if failure is not None and failure.kind in ("mistake", "error"):
        with contextlib.suppress(RuntimeError, OSError):
            store.compare_set("cause", "", failure.to_json())
    _note(store, "ended", rank())
    if failure is not None:
        leave(1)
    finished(0)
    return 0


def _note(store: Any, what: str, rank: int, *values: object) -> None:
    """Write to the store that a rank has begun or ended, for `_killed`."""
    with contextlib.suppress(RuntimeError, OSError):  # the process that keeps the store has ended
        store.set(f"{what}-{rank}", json.dumps(values))


# The store. ----------------------------------------------------------------------------------------------------------


def _connect(timeout: timedelta = _WAIT) -> Any:
    """Return the store that all ranks share. torchrun keeps it over restarts."""
    with uncollected():
        from torch.distributed.distributed_c10d import PrefixStore
        from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return PrefixStore("hydraloop-launch", store)


def _store(timeout: timedelta = _WAIT) -> Any:
    """Return the part of the store that belongs to this attempt."""
    from torch.distributed.distributed_c10d import PrefixStore

    return PrefixStore(str(attempt()), _connect(timeout))


def _keeps_store() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


# Restarts. -----------------------------------------------------------------------------------------------------------


def remember(plan: RunPlan) -> None:
    """Write to torchrun's store where a run starts, unless an earlier attempt has written it. See `earlier`."""
    if _keeps_store():
        start = None if plan.checkpoint is None else str(plan.checkpoint.absolute())
        _connect().compare_set("run", "", json.dumps([str(plan.run_dir.absolute()), start, list(plan.known)]))


def earlier(resume: str | None) -> Find | None:
    """Return a function that finds where a run continues that torchrun has restarted; None for a run that starts.

    Args:
        resume: of the config. With `auto`, a run that the store does not know continues like any other.

    Raises:
        UserError: torchrun has kept no store over the restart.
    """
    if not attempt():
        if _keeps_store():
            _connect().set("started", "")
        return None
    if resume == "auto" and not _keeps_store():
        return None
    problem = "the restarted ranks cannot find their run, since "
    if not _keeps_store():
        remedy = "Use --rdzv-backend=c10d, or leave it out and continue the run with resume=auto."
        raise UserError(f"{problem}torchrun keeps no store for them", key="--max-restarts", remedy=remedy)
    store = _connect()
    if not store.check(["run"]):
        # Rank 0's torchrun keeps the store. If it has ended, another one has made a new store.
        if resume != "auto" and not store.check(["started"]):
            problem += "the torchrun that kept their store has ended"
            raise UserError(problem, key="--max-restarts", remedy="Continue the run with resume=auto.")
        return None  # the ranks failed before there was a run
    run_dir, start, known = json.loads(store.get("run"))

    def find(named: Path | None) -> tuple[Path, Path | None]:
        newest = newest_checkpoint(Path(run_dir), known=known)
        return Path(run_dir), newest or (Path(start) if start else None)

    return find
