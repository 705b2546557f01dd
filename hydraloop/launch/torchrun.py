"""Being one of the ranks that torchrun, or another launcher with its environment variables, has started.

Rank 0 does what a single process does: it composes, checks and makes the run directory. Then it gives the job to the
other ranks, over the store they all share; they have waited for it and have not looked at the config files at all.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil

from hydraloop.cli.arguments import read, take_dry_run
from hydraloop.launch import deaths, rank_log
from hydraloop.launch.job import Job
from hydraloop.launch.job_result import Ended
from hydraloop.launch.outcome import Outcome, Terminated
from hydraloop.launch.termination import Ending, leave
from hydraloop.launch.training import train
from hydraloop.run import atomic
from hydraloop.run import directory as run_directory
from hydraloop.run.attempts import RECORDS

_NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PRINTING = ("help", "hydra_help", "info", "cfg", "shell_completion", "version")
"""Flags with which nothing is trained."""
_WAIT = timedelta(minutes=30)
"""For rank 0's job: composing a sweep's worth of configs on a slow disk takes minutes; torch's own half hour."""
_LAST_WORDS = 10.0
"""Seconds that rank 0 waits for how another rank ended, once that has failed."""
_SOON = timedelta(seconds=5)
"""For the store, when the process is about to be ended: torchrun, which keeps it, may have gone."""
_RECORD = "launch.json"
"""In a run's records: who launched it."""


def is_several() -> bool:
    """Whether this process is one of several ranks."""
    return all(name in os.environ for name in _NEEDED) and int(os.environ["WORLD_SIZE"]) > 1


def is_launched() -> bool:
    """Whether torchrun started this process, be it on its own."""
    return is_several() or "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    """This process's rank; 0 where there is one process."""
    return int(os.environ["RANK"]) if is_several() else 0


def keep_quiet() -> None:
    """Leave out torch's stack traces of each connection that breaks when a rank has gone; before torch is imported."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")


def local_world_size() -> int:
    """How many ranks this machine has."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", os.environ.get("WORLD_SIZE", "1")))


def attempt() -> int:
    """0 for the first start, n for the n-th restart."""
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))


# Rank 0. -------------------------------------------------------------------------------------------------------------


class Leader:
    """Rank 0's side."""

    def __init__(self) -> None:
        self._told = False
        self._outcome: Outcome | None = None
        self._launcher = os.getppid()

    def lead(self, job: Job, close: Callable[[Ended], None]) -> Outcome:
        """Give the job to the other ranks, and train with them. Returns the outcome that is the job's.

        Signals stay handled when this has returned: torchrun sends one as soon as another rank has failed, and the
        error may not have been reported yet.

        Args:
            close: called from another thread if the main thread does not come back within `ending.GRACE` seconds after
                a signal, as from a collective without the other ranks.
        """
        store = _store()
        record(Path(job.run_dir), None if job.checkpoint is None else Path(job.checkpoint), began=job.began)
        self._tell(store, {"job": job.to_json()})

        def last(number: int) -> None:
            if self._outcome is None:
                outcome = Outcome.of(Terminated(number or signal.SIGTERM), 0)
                with contextlib.suppress(RuntimeError, OSError):
                    outcome = _first(_store(_SOON), outcome, job, self._launcher)
                close(Ended.of(outcome))

        outcome = train(job, 0, Ending(last=last).start())
        told = outcome.kind in ("consequence", "lost", "signal")
        self._outcome = _first(store, outcome, job, self._launcher) if told else outcome
        return self._outcome

    def leave(self, code: int) -> None:
        """End after an error; where there was no job, let the other ranks go (torchrun itself does so)."""
        if self._told:
            leave(code)
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
            with contextlib.suppress(RuntimeError, OSError):
                self._tell(_store(), {"job": None})

    def _tell(self, store: Any, message: dict[str, str | None]) -> None:
        self._told = True
        store.set("job", json.dumps(message))


def _first(store: Any, own: Outcome, job: Job, launcher: int) -> Outcome:
    """Return the outcome of the rank that failed first; rank 0's own if no other rank has failed by itself.

    Args:
        launcher: process ID of rank 0's parent at the start. When it has gone, the ranks end one after another.
    """
    began, patience = time.monotonic(), _LAST_WORDS
    while True:
        try:
            if store.check(["cause"]):
                return Outcome.from_json(store.get("cause"))
            died, others_live = deaths.look(store, job)
        except (RuntimeError, OSError):  # the process that keeps the store has gone
            ended = own.kind == "lost" and os.getppid() != launcher
            return Outcome.of(Terminated(signal.SIGTERM), 0, trained=own.trained) if ended else own
        if died is not None:
            return replace(died, trained=own.trained)
        if own.kind == "lost" and not others_live:  # a rank on another machine, which may have been killed
            patience = 1.0
        # A signal comes from torchrun: if another rank has failed, it did so before.
        if own.kind == "signal" or time.monotonic() > began + patience:
            return own
        time.sleep(0.05)


# The other ranks. ----------------------------------------------------------------------------------------------------


def follow(argv: Sequence[str]) -> int:
    """Wait for rank 0's job and train with it. Returns the exit code; says nothing, since rank 0 speaks for all."""
    if _prints(argv):
        return 0
    try:
        store = _store()
        message = json.loads(store.get("job"))
    except (RuntimeError, OSError, KeyboardInterrupt):  # rank 0 has gone, or all have been told to end
        return 1
    if message["job"] is None:
        return 1
    job = Job.from_json(message["job"])
    rank_log.configure(job, rank())

    def last(number: int) -> None:
        print(f"ended by signal {number} in the middle of it", file=sys.stderr, flush=True)
        with contextlib.suppress(RuntimeError, OSError):
            deaths.ended(_store(_SOON), rank())

    ending = Ending(last=last).start()
    deaths.begun(store, rank(), rank_log.path(job, rank()))
    outcome = train(job, rank(), ending)
    if outcome.kind in ("mistake", "error"):
        with contextlib.suppress(RuntimeError, OSError):
            store.compare_set("cause", "", outcome.to_json())
    deaths.ended(store, rank())
    if outcome.kind == "done":
        return 0
    leave(1)
    return 1


def _prints(argv: Sequence[str]) -> bool:
    """Whether the command line only asks for something to be shown, or cannot be read at all: rank 0 says so."""
    argv, dry_run = take_dry_run(argv)
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            args = read(argv)
    except SystemExit as error:
        if error.code:
            sys.exit(1)
        return True
    return dry_run or any(getattr(args, flag, None) for flag in _PRINTING)


def _store(timeout: timedelta = _WAIT) -> Any:
    """The ranks' store, this attempt's part of it: torchrun keeps one over its restarts."""
    from torch.distributed.distributed_c10d import PrefixStore
    from torch.distributed.rendezvous import rendezvous

    store, _, _ = next(rendezvous("env://", timeout=timeout))
    return PrefixStore(f"hydraloop-launch-{attempt()}", store)


# Restarts. -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Launched:
    """The first start of a run that torchrun has restarted."""

    run_dir: Path
    began: float
    checkpoint: Path | None
    """Where the first start went on."""

    def resumed(self) -> run_directory.Resumed:
        """Where the restart goes on: the newest checkpoint the run has written since it began."""
        newest = run_directory.newest_checkpoint(self.run_dir, since=self.began)
        return run_directory.Resumed(self.run_dir, newest or self.checkpoint)


def record(run_dir: Path, checkpoint: Path | None, *, began: float) -> None:
    """Note in the run's records who launched it, for `earlier`. Does nothing without torchrun, and in a restart.

    Args:
        checkpoint: where the run continues; None: it is new.
        began: in seconds since 1970; checkpoints after that are its own.
    """
    path = run_dir / RECORDS / _RECORD
    if "TORCHELASTIC_RUN_ID" in os.environ and not (attempt() and path.exists()):
        path.parent.mkdir(exist_ok=True)
        start = None if checkpoint is None else str(checkpoint.absolute())
        noted = {"launcher": _launcher(), "began": began, "checkpoint": start}
        atomic.write_text(path, json.dumps(noted))


def earlier(*run_dirs: str) -> Launched | None:
    """Return the run that this launcher began before it restarted the ranks; None if this is the first start.

    Args:
        run_dirs: where its directory may be, patterns as of `Path.glob`.
    """
    if not attempt():
        return None
    patterns = [Path(one) / RECORDS / _RECORD for one in run_dirs]
    found = [path for one in patterns for path in Path(one.anchor).glob(str(one.relative_to(one.anchor)))]
    for path in sorted(found, key=lambda path: path.stat().st_mtime, reverse=True):
        try:
            noted = json.loads(path.read_text(encoding="utf-8"))
            if _is_same(noted["launcher"], _launcher()):
                checkpoint = noted["checkpoint"]
                began = float(noted["began"])
                return Launched(path.parent.parent, began, None if checkpoint is None else Path(checkpoint))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return None


def _launcher() -> dict[str, str | int | float]:
    """Which torchrun this is: its process; and its id, for a rank 0 that has moved to another machine."""
    process = psutil.Process(os.getppid())
    return {
        "run_id": os.environ["TORCHELASTIC_RUN_ID"],
        "host": socket.gethostname(),
        "pid": process.pid,
        "started": process.create_time(),
    }


def _is_same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    moved = one["host"] != other["host"] and one["run_id"] == other["run_id"] != "none"  # torchrun's name for no id
    return one == other or moved
