"""SubmititExecutor: runs each job of a sweep as a job of Slurm. submitit makes the script of its parameters."""

from __future__ import annotations

import logging
import os
import shlex
import shutil
import signal
import time
import warnings
from collections import deque
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hydra.core.utils import env_override

from hydraloop.errors import UserError, not_installed
from hydraloop.files.environment import SWEEP_JOB
from hydraloop.launch import slurm
from hydraloop.launch.exit import REQUEUE
from hydraloop.sweeps.executors import slurm_queue
from hydraloop.sweeps.executors.executor import Cause, Ended, Executor, Request
from hydraloop.sweeps.executors.spawned import Spawn, command
from hydraloop.sweeps.job_states import LOG

log = logging.getLogger(__name__)

KEY = "sweep.submitit"
_DELAY = 90
"""Seconds between the signal and the time limit, as submitit's default."""
_READ_CODES = 0.5
"""Seconds between two reads of the exit codes of jobs, which are files."""
_ASK_SLURM = 10.0
"""Seconds between two questions to Slurm about jobs that have no exit code, as they may have been killed."""
_ASK_SLURM_ABOUT_END = 2.0
"""Seconds between two questions about jobs that have ended early."""
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 300.0
"""Seconds of the first pause after Slurm has refused a job, which then doubles, and of the longest one."""
_SCRIPT = 'log=$1; shift; exec env "$@" >>"$log" 2>&1 </dev/null'
_ENDINGS = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM)
"""Signals after which a job exits by itself, with 128 and their number."""
_ENDED_BY_SLURM = ("CANCELLED", "DEADLINE", "PREEMPTED", "TIMEOUT")
"""States of jobs in which Slurm has ended the script with SIGTERM."""


class SubmititExecutor(Executor):
    """Runs each job as a new Python process, where Slurm starts it. Slurm may start it again under its id.

    Jobs wait in Slurm's queue. They continue when this process ends.

    Args:
        spawn: writes the requests. All machines share the directory of its sweep.
        uid: of the sweep, for the names of jobs.
        options: parameters of submitit's AutoExecutor.

    Raises:
        UserError: as of `create_executor`.
    """

    def __init__(self, spawn: Spawn, uid: str, options: Mapping[str, Any]) -> None:
        self._spawn = spawn
        self._uid = uid
        self._options = options
        self._folder = spawn.sweep / slurm_queue.FOLDER
        self._slurm = create_executor(self._folder, options)
        self._jobs: dict[int, str] = {}
        self._waiting: deque[Request] = deque()
        """Jobs that are submitted when Slurm takes the first of them."""
        self._pause = 0.0
        """Seconds between the last two attempts to submit that job; 0 if Slurm has taken the job before it."""
        self._submit_at = 0.0
        """When that job is submitted again."""
        self._withdrawn: list[Ended] = []
        """Jobs that were cancelled before they were submitted."""
        self._asked_at = time.monotonic()
        """When Slurm was last asked about jobs."""

    def wait_ready(self) -> None:
        """Do nothing: jobs wait in Slurm's queue."""

    def adopt(self) -> list[int]:
        """Take over the jobs of an earlier controller that are in Slurm's queue. Waits until Slurm answers."""
        pause = 0.0
        while (queue := slurm_queue.jobs(self._spawn.sweep)) is None:
            if not pause:
                log.warning("Slurm does not answer, so it is not known which jobs run: waiting for it")
            pause = min(pause * 2, _LONGEST_PAUSE) or _FIRST_PAUSE
            time.sleep(pause)
        self._jobs = {int(what.partition(".")[0]): job.id for what, job in queue.items() if what != slurm_queue.MAIN}
        return [*self._jobs]

    def submit(self, request: Request) -> None:
        """Submit a job, see `Executor`. If Slurm refuses it, it is submitted later.

        Raises:
            UserError: Slurm has never taken a job of the sweep.
        """
        self._waiting.append(request)
        if not self._pause:
            self._submit_waiting()

    def _submit_waiting(self) -> None:
        while self._waiting:
            request = self._waiting[0]
            try:
                self._jobs[request.number] = self._submit(request)
            except Exception as error:  # of submitit, for any answer of sbatch
                if not self._has_taken():
                    self._waiting.clear()
                    raise UserError(
                        f"job {request.number} could not be submitted: {error}",
                        key=KEY,
                        remedy=f"Continue when Slurm accepts it: sweep.resume={self._spawn.sweep}",
                    ) from error
                if not self._pause:
                    log.warning("job %d could not be submitted, and will be again: %s", request.number, error)
                self._pause = min(self._pause * 2, _LONGEST_PAUSE) or _FIRST_PAUSE
                self._submit_at = time.monotonic() + self._pause
                return
            self._waiting.popleft()
            self._pause = 0.0

    def _submit(self, request: Request) -> str:
        """Submit a job, unless it is in the queue. Return its id."""
        what = _name(request)
        if self._pause:  # `sbatch` may have failed after Slurm had taken the job
            queue = slurm_queue.jobs(self._spawn.sweep)
            if queue is None:
                raise RuntimeError("squeue does not answer")
            if what in queue:
                return queue[what].id
        path, variables = self._spawn.write(request)
        name, words = slurm_queue.name_of(self._options, self._uid, what), [f"{SWEEP_JOB}={path}", *command()]
        return submit_command(self._slurm, name, words, variables, Path(request.folder, LOG))

    def _has_taken(self) -> bool:
        """Return whether Slurm has ever taken a job of the sweep."""
        queue = slurm_queue.jobs(self._spawn.sweep) or {}
        return any(self._folder.glob("*_submission.sh")) or bool(queue.keys() - {slurm_queue.MAIN})

    def poll(self, seconds: float) -> list[Ended]:
        """Return the jobs that have ended, see `Executor`."""
        until = time.monotonic() + seconds
        while True:
            if time.monotonic() > self._submit_at:
                self._submit_waiting()
            ended = self._ended()
            for end in ended:
                del self._jobs[end.number]
            ended += self._withdrawn
            self._withdrawn = []
            remaining = until - time.monotonic()
            if ended or remaining <= 0:
                return ended
            time.sleep(min(remaining, _READ_CODES))

    def _ended(self) -> list[Ended]:
        """Return the jobs that have ended. Slurm tells whether it starts a job again that has ended early."""
        codes = {number: slurm.code(self._folder, job) for number, job in self._jobs.items()}
        ended = [Ended(number, 0) for number, code in codes.items() if code == 0]
        has_early = any(code not in (None, 0) for code in codes.values())
        if time.monotonic() < self._asked_at + (_ASK_SLURM_ABOUT_END if has_early else _ASK_SLURM):
            return ended
        self._asked_at = time.monotonic()
        queue = slurm.queue()
        if queue is None:
            return ended
        for number, job in self._jobs.items():
            in_queue = queue.get(job)
            if codes[number] != 0 and (in_queue is None or in_queue.has_ended):
                code = slurm.code(self._folder, job)  # the job may have ended while Slurm was asked
                ended.append(_end(number, code, None if in_queue is None else in_queue.state))
        return ended

    def cancel(self, number: int, sign: signal.Signals) -> None:
        """Let a job save and end, see `Executor`. Slurm kills it half a minute later.

        Raises:
            UserError: the job is to be killed, and Slurm does not answer.
        """
        for request in [request for request in self._waiting if request.number == number]:
            self._withdraw(request)
        if number in self._jobs:
            self._asked_at = float("-inf")
            is_cancelled = slurm.cancel(self._jobs[number])  # not if it has ended
            if not is_cancelled and sign == signal.SIGKILL and slurm.queue() is None:
                raise UserError(
                    f"Slurm does not answer, and could not end its jobs: {', '.join(self._jobs.values())}",
                    key=KEY,
                    remedy=f"When it answers, end them with scancel, or continue: sweep.resume={self._spawn.sweep}",
                )

    def _withdraw(self, request: Request) -> None:
        """Do not submit a job. If Slurm has taken it nevertheless, it is cancelled, or the next controller finds it."""
        self._waiting.remove(request)
        job = (slurm_queue.jobs(self._spawn.sweep) or {}).get(_name(request))
        if job is not None:
            self._jobs[request.number] = job.id
            return
        self._withdrawn.append(Ended(request.number, REQUEUE))

    def close(self) -> None:
        """Do nothing: submitted jobs continue."""


def _name(request: Request) -> str:
    """Return job and attempt, for the name in Slurm."""
    return f"{request.number}.{request.attempt}"


def submit_command(executor: Any, name: str, words: Sequence[str], variables: Mapping[str, str], log: Path) -> str:
    """Submit a command and return the id of the job.

    Args:
        executor: of `create_executor`.
        name: of the job.
        words: variables and the command, as for `env`. submitit writes them to files.
        variables: for the environment of the job, which sbatch exports.
        log: for what the command prints.

    Raises:
        Exception: of submitit, for any answer of sbatch.
    """
    from submitit.helpers import clean_env

    executor.folder.mkdir(exist_ok=True)
    executor.parameters["job_name"] = name
    script = shlex.join(["sh", "-c", _SCRIPT, "sh", str(log), *words])
    given = {name: value for name, value in os.environ.items() if name.startswith(("SBATCH_", "SLURM_CONF"))}
    with clean_env(), env_override({**given, **variables}):  # without those of the controller's job
        return str(executor._submit_command(script).job_id)  # `submit` would pickle a function


def create_executor(folder: Path, options: Mapping[str, Any]) -> Any:
    """Return submitit's executor for Slurm, whose jobs start again.

    Args:
        folder: for its files.
        options: `sweep.submitit`.

    Raises:
        UserError: submitit is not installed, there is no Slurm, or a parameter is wrong or missing.
    """
    _check(options)
    import submitit

    try:
        found = submitit.AutoExecutor(folder, cluster="slurm")
        with warnings.catch_warnings(action="error", category=UserWarning):  # an earlier name of a parameter
            found.update_parameters(**_parameters(options))
    except (NameError, RuntimeError, TypeError, UserWarning, ValueError) as error:
        raise UserError(" ".join(str(error).split()), key=KEY, remedy="See submitit's documentation.") from error
    executor = found._executor  # AutoExecutor hides what it chose
    slurm.start_again(executor.parameters, folder)
    return executor


def _check(options: Mapping[str, Any]) -> None:
    if find_spec("submitit") is None:
        raise not_installed("submitit", key="sweep.executor")
    if shutil.which("srun") is None:
        remedy = "Run the command where sbatch works, or the jobs on this machine: sweep.executor=pool"
        raise UserError("this machine has no Slurm", key="sweep.executor", remedy=remedy)
    if "timeout_min" not in options:
        raise UserError(
            "submitit would end each job after a few minutes",
            key=f"{KEY}.timeout_min",
            remedy="Set the time limit of a job, in minutes: sweep.submitit.timeout_min=240",
        )


def _parameters(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters for submitit. Before the time limit, Slurm sends SIGTERM, after which a run saves."""
    own = {"signal": f"TERM@{options.get('slurm_signal_delay_s', _DELAY)}", "requeue": True}
    return {**options, "slurm_additional_parameters": {**own, **options.get("slurm_additional_parameters", {})}}


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
    if state == "CANCELLED":
        return Ended(number, code, Cause.CANCELLED)
    return Ended(number, code, Cause.SCHEDULER if code == REQUEUE else Cause.PROCESS)
