"""SubmititExecutor: runs each job of a sweep as a job of Slurm. submitit makes the script of its parameters."""

from __future__ import annotations

import shlex
import shutil
import signal
import subprocess
import time
import warnings
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.utils import env_override

from hydraloop.errors import UserError, not_installed
from hydraloop.platforms import signals
from hydraloop.processes import slurm
from hydraloop.processes.failure import REQUEUE
from hydraloop.run_files.environment import SWEEP_JOB
from hydraloop.sweeps.executors.executor import LEFT, Ended, Executor, Request
from hydraloop.sweeps.executors.spawned import Spawn, command
from hydraloop.sweeps.states import LOG

KEY = "sweep.submitit"
_FOLDER = ".submitit"
"""In the directory of the sweep: scripts and logs of submitit, and exit codes."""
DELAY = 90
"""Seconds between the signal and the time limit, as submitit's default."""
_LOOK = 0.5
"""Seconds between two looks for exit codes of jobs, which are files."""
_ASK = 10.0
"""Seconds between two questions to Slurm about jobs that have no exit code, as they may have been killed."""
_ASK_ABOUT_END = 2.0
"""Seconds between two questions about jobs that have ended early."""
_SCRIPT = 'log=$1; shift; exec env "$@" >>"$log" 2>&1 </dev/null'
_ENDINGS = signals("SIGHUP", "SIGINT", "SIGTERM")
"""Signals after which a job exits by itself, with 128 and their number."""
_ENDED_BY_SLURM = ("CANCELLED", "DEADLINE", "PREEMPTED", "TIMEOUT")
"""States of jobs in which Slurm has ended the script with SIGTERM."""


class SubmititExecutor(Executor):
    """Runs each job as a new Python process, where Slurm starts it. Slurm may start it again under its id.

    Args:
        spawn: writes the requests. All machines share the directory of its sweep.
        options: parameters of submitit's AutoExecutor.

    Raises:
        UserError: as of `create_executor`.
    """

    def __init__(self, spawn: Spawn, options: Mapping[str, Any]) -> None:
        self._spawn, self._folder = spawn, spawn.sweep / _FOLDER
        self._slurm = create_executor(spawn.sweep, options)
        slurm.start_again(self._slurm.parameters, self._folder)
        self._jobs: dict[int, str] = {}
        self._asked = time.monotonic()

    def wait_ready(self) -> None:
        """Do nothing: jobs wait in Slurm's queue."""

    def submit(self, request: Request) -> None:
        """Submit a job, see `Executor`."""
        try:
            path, variables = self._spawn.write(request)
            words = [f"{SWEEP_JOB}={path}", *command()]
            self._jobs[request.number] = submit_command(self._slurm, words, variables, Path(request.folder, LOG))
        except Exception as error:  # of submitit, for any answer of sbatch
            raise UserError(
                f"job {request.number} could not be submitted: {error}",
                key=KEY,
                remedy=f"Continue when Slurm accepts it: sweep.resume={self._spawn.sweep}",
            ) from error

    def poll(self, seconds: float) -> list[Ended]:
        """Return the jobs that have ended, see `Executor`."""
        until = time.monotonic() + seconds
        while True:
            ended = self._ended()
            for end in ended:
                del self._jobs[end.number]
            left = until - time.monotonic()
            if ended or left <= 0:
                return ended
            time.sleep(min(left, _LOOK))

    def _ended(self) -> list[Ended]:
        """Return the jobs that have ended. Slurm tells whether it starts a job again that has ended early."""
        codes = {number: slurm.code(self._folder, job) for number, job in self._jobs.items()}
        ended = [Ended(number, 0) for number, code in codes.items() if code == 0]
        has_early = any(code not in (None, 0) for code in codes.values())
        if time.monotonic() < self._asked + (_ASK_ABOUT_END if has_early else _ASK):
            return ended
        self._asked = time.monotonic()
        states = slurm.states()
        if states is None:
            return ended
        for number, job in self._jobs.items():
            state = states.get(job)
            if codes[number] != 0 and (state is None or state in slurm.ENDS):
                code = slurm.code(self._folder, job)  # again: it may have ended while Slurm was asked
                ended.append(_end(number, code, state))
        return ended

    def cancel(self, number: int, sign: signal.Signals) -> None:
        """Let a job save and end, see `Executor`. Slurm kills it half a minute later.

        Raises:
            UserError: the job is to be killed, and Slurm does not answer.
        """
        if number in self._jobs:
            self._asked = float("-inf")
            done = subprocess.run(
                ["scancel", self._jobs[number]], capture_output=True, check=False
            )  # it may have ended
            if done.returncode and sign == signal.SIGKILL and slurm.states() is None:
                raise UserError(
                    f"Slurm does not answer, and could not end its jobs: {', '.join(self._jobs.values())}",
                    key=KEY,
                    remedy=f"When it answers, end them with scancel, or continue: sweep.resume={self._spawn.sweep}",
                )

    def close(self) -> None:
        """Do nothing: submitted jobs continue."""


def submit_command(executor: Any, words: Sequence[str], variables: Mapping[str, str], log: Path | None = None) -> str:
    """Submit a command and return the id of the job.

    Args:
        executor: submitit's SlurmExecutor.
        words: variables and the command, as for `env`. submitit writes them to files.
        variables: for the environment of the job, which sbatch exports.
        log: for what the command prints; None: a file of submitit.

    Raises:
        Exception: of submitit, for any answer of sbatch.
    """
    before = ["env"] if log is None else ["sh", "-c", _SCRIPT, "sh", str(log)]
    executor.folder.mkdir(exist_ok=True)
    with env_override(dict(variables)):
        script = shlex.join([*before, *words])
        return str(executor._submit_command(script).job_id)  # `submit` would pickle a function


def create_executor(sweep: Path, options: Mapping[str, Any]) -> Any:
    """Return submitit's executor for Slurm, or for this machine.

    Args:
        sweep: the directory of the sweep.
        options: `sweep.submitit`.

    Raises:
        UserError: submitit is not installed, there is no Slurm, or a parameter is wrong or missing.
    """
    _check(options)
    import submitit

    cluster = options.get("cluster", "slurm")
    try:
        found = submitit.AutoExecutor(sweep / _FOLDER, cluster=cluster)
        with warnings.catch_warnings(action="error", category=UserWarning):  # an earlier name of a parameter
            found.update_parameters(**_parameters(options))
    except (NameError, RuntimeError, TypeError, UserWarning, ValueError) as error:
        raise UserError(" ".join(str(error).split()), key=KEY, remedy="See submitit's documentation.") from error
    return found._executor  # AutoExecutor hides what it chose


def is_local(options: Mapping[str, Any]) -> bool:
    """Return whether jobs run on this machine, to try the options."""
    return options.get("cluster") == "local"


def _check(options: Mapping[str, Any]) -> None:
    if find_spec("submitit") is None:
        raise not_installed("submitit", key="sweep.executor")
    cluster = options.get("cluster", "slurm")
    if cluster not in ("slurm", "local"):
        raise UserError(f"{cluster!r} is unknown", key=f"{KEY}.cluster", remedy="Use slurm or local.")
    if cluster == "slurm" and shutil.which("srun") is None:
        remedy = "Run the command where sbatch works, or the jobs on this machine: sweep.submitit.cluster=local"
        raise UserError("this machine has no Slurm", key="sweep.executor", remedy=remedy)
    if "timeout_min" not in options:
        raise UserError(
            "submitit would end each job after a few minutes",
            key=f"{KEY}.timeout_min",
            remedy="Set the time limit of a job, in minutes: sweep.submitit.timeout_min=240",
        )


def _parameters(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters for submitit. Before the time limit, Slurm sends SIGTERM, after which a run saves."""
    found = {"name": "hydraloop", **{name: value for name, value in options.items() if name != "cluster"}}
    if not is_local(options):
        own = {"signal": f"TERM@{found.get('slurm_signal_delay_s', DELAY)}", "requeue": True}
        found["slurm_additional_parameters"] = {**own, **found.get("slurm_additional_parameters", {})}
    return found


def _end(number: int, code: int | None, state: str | None) -> Ended:
    """Return how a job has ended that Slurm does not start again.

    Args:
        code: the exit code of its script; None if that was killed.
        state: in Slurm; None if Slurm does not know the job any more.
    """
    if code is None:
        killed = {"OUT_OF_MEMORY": -signal.SIGKILL, **dict.fromkeys(_ENDED_BY_SLURM, -signal.SIGTERM)}
        code = killed.get(str(state))
    elif code > 128 and code - 128 not in _ENDINGS:
        code = 128 - code
    is_cancelled = state == "CANCELLED"
    return Ended(number, code, by_scheduler=code in (REQUEUE, LEFT) and not is_cancelled, is_cancelled=is_cancelled)
