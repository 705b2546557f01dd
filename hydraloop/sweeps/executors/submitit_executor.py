"""SubmititExecutor: runs jobs with the library submitit, which gives them to Slurm, or to processes of this machine."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from hydra.core.utils import env_override

from hydraloop.errors import UserError, not_installed
from hydraloop.platforms import signals
from hydraloop.processes.failure import REQUEUE
from hydraloop.run_files.environment import SWEEP_JOB
from hydraloop.run_files.processes import kill_tree
from hydraloop.sweeps.executors.executor import Ended, Executor, Request
from hydraloop.sweeps.executors.spawned import Spawn, command
from hydraloop.sweeps.states import LOG

_KEY = "sweep.submitit"
_LOOK = 0.5
"""Seconds between two looks for results of jobs, which are files."""
_ASK = 30.0
"""Seconds between two questions to Slurm about jobs that have no result, as they may have been killed."""
_SCRIPT = """trap : TERM INT
log=$1; shift
env "$@" >>"$log" 2>&1 </dev/null
echo $?"""
"""The shell waits for the job, which gets the same signals as it does, and returns the exit code as its output."""
_ENDINGS = signals("SIGHUP", "SIGINT", "SIGTERM")
"""Signals after which a job exits by itself, with 128 and their number."""


class SubmititExecutor(Executor):
    """Runs each job as a new Python process, where submitit starts it.

    Args:
        spawn: writes the requests. All machines share the directory of its sweep.
        options: `cluster` (`slurm`, the default, or `local`), and parameters of submitit's AutoExecutor.

    Raises:
        UserError: there is no Slurm, a parameter is wrong, or that of `check`.
    """

    def __init__(self, spawn: Spawn, options: Mapping[str, Any]) -> None:
        self._executor = auto_executor(spawn.sweep, options)
        from submitit.helpers import CommandFunction

        self._spawn, self._function, self._is_local = spawn, CommandFunction, options.get("cluster") == "local"
        self._jobs: dict[int, Any] = {}
        self._asked = time.monotonic()
        self._cancels = False
        """Whether the controller has cancelled jobs."""

    def wait_ready(self) -> None:
        """Do nothing: jobs wait in Slurm's queue."""

    def submit(self, request: Request) -> None:
        """Submit a job, see `Executor`."""
        try:
            path, variables = self._spawn.write(request)
            words = [str(Path(request.folder, LOG)), f"{SWEEP_JOB}={path}", *command()]
            with env_override(variables):  # which sbatch exports; submitit writes the words to files
                self._jobs[request.number] = self._executor.submit(self._function(["sh", "-c", _SCRIPT, "sh", *words]))
        except Exception as error:  # of submitit, for any answer of sbatch
            raise UserError(
                f"job {request.number} could not be submitted: {error}",
                key=_KEY,
                remedy=f"Continue when Slurm accepts it: sweep.resume={self._spawn.sweep}",
            ) from error

    def poll(self, seconds: float) -> list[Ended]:
        """Return the jobs that have ended, see `Executor`."""
        until = time.monotonic() + seconds
        while True:
            asks = time.monotonic() > self._asked + _ASK
            if asks:
                self._asked = time.monotonic()
            over = [number for number, job in self._jobs.items() if job.done(force_check=asks)]
            ended = [end for number in over if (end := self._end(number, self._jobs[number])) is not None]
            for end in ended:
                del self._jobs[end.number]
            left = until - time.monotonic()
            if ended or left <= 0:
                return ended
            time.sleep(min(left, _LOOK))

    def _end(self, number: int, job: Any) -> Ended | None:
        """Return how a job has ended; None if it was preempted, and Slurm does not say yet whether a user did that."""
        code = _code(job)
        if code != REQUEUE or self._is_local or self._cancels:
            return Ended(number, code)
        state = _slurm_state(job.job_id)
        return None if state == "COMPLETING" else Ended(number, code, by_scheduler=state != "CANCELLED")

    def cancel(self, number: int, sign: signal.Signals) -> None:
        """Let a job save and end, see `Executor`. Slurm kills it half a minute later."""
        job = self._jobs.get(number)
        if job is None:
            return
        self._cancels = True
        self._asked = float("-inf")
        if not self._is_local:
            job.cancel(check=False)
        elif sign is signal.SIGKILL:
            kill_tree(int(job.job_id))
        else:  # the processes of submitit ignore it
            with suppress(psutil.Error):
                for process in psutil.Process(int(job.job_id)).children(recursive=True):
                    with suppress(psutil.Error):
                        process.send_signal(signal.SIGTERM)

    def close(self) -> None:
        """Do nothing: submitted jobs continue."""


def auto_executor(sweep: Path, options: Mapping[str, Any], **additional: Any) -> Any:
    """Return submitit's AutoExecutor.

    Args:
        sweep: the directory of the sweep.
        options: `sweep.submitit`.
        additional: options of `sbatch` that the user may replace.

    Raises:
        UserError: there is no Slurm, a parameter is wrong, or that of `check`.
    """
    check(options)
    import submitit

    cluster = options.get("cluster", "slurm")
    try:
        found = submitit.AutoExecutor(sweep / ".submitit", cluster=cluster)
        with warnings.catch_warnings(action="error", category=UserWarning):  # an earlier name of a parameter
            found.update_parameters(**_parameters(options, additional, is_local=cluster == "local"))
    except (NameError, RuntimeError, TypeError, UserWarning, ValueError) as error:
        raise UserError(" ".join(str(error).split()), key=_KEY, remedy="See submitit's documentation.") from error
    return found


def check(options: Mapping[str, Any]) -> None:
    """Check what needs no directory.

    Raises:
        UserError: submitit is not installed, or an option is wrong or missing.
    """
    if find_spec("submitit") is None:
        raise not_installed("submitit", key="sweep.executor")
    cluster = options.get("cluster", "slurm")
    if cluster not in ("slurm", "local"):
        raise UserError(f"{cluster!r} is unknown", key=f"{_KEY}.cluster", remedy="Use slurm or local.")
    if cluster == "slurm" and shutil.which("srun") is None:
        remedy = "Run the command where sbatch works, or the jobs on this machine: sweep.submitit.cluster=local"
        raise UserError("this machine has no Slurm", key="sweep.executor", remedy=remedy)
    if "timeout_min" not in options:
        raise UserError(
            "submitit would end each job after a few minutes",
            key=f"{_KEY}.timeout_min",
            remedy="Set the time limit of a job, in minutes: sweep.submitit.timeout_min=240",
        )


def _parameters(options: Mapping[str, Any], additional: Mapping[str, Any], *, is_local: bool) -> dict[str, Any]:
    """Return the parameters for submitit. Before the time limit, Slurm sends SIGTERM, after which a run saves."""
    found = {"name": "hydraloop", **{name: value for name, value in options.items() if name != "cluster"}}
    if not is_local:
        own = {"signal": f"TERM@{found.get('slurm_signal_delay_s', 90)}", **additional}
        found["slurm_additional_parameters"] = {**own, **found.get("slurm_additional_parameters", {})}
    return found


def _slurm_state(job_id: str) -> str | None:
    """Return a job's state in Slurm, `CANCELLED` after scancel; None if Slurm does not know it any more.

    Slurm tells this without accounting, for some minutes after the job's end.
    """
    try:
        done = subprocess.run(["scontrol", "show", "job", "-o", job_id], capture_output=True, text=True, check=False)
    except OSError:
        return None
    found = re.search(r"\bJobState=(\w+)", done.stdout)
    return None if found is None else found[1]


def _code(job: Any) -> int:
    """Return the exit code of a job that has ended. A job without one was killed."""
    if not job.paths.result_pickle.exists():  # `result` would wait for it
        return -signal.SIGKILL
    try:
        code = int(job.result())
    except Exception:
        return -signal.SIGKILL
    return 128 - code if code > 128 and code - 128 not in _ENDINGS else code
