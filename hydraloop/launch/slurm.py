"""Jobs of Slurm that start again under their id: when their time limit is near, and after the death of a node.

Some time before the time limit, Slurm sends a signal to the run. The run saves and exits with 75. Then the script of
the job asks Slurm to start the job again, unless the job was cancelled. A run that has no newer checkpoint than at its
start would repeat forever: it exits with 143. Slurm itself starts a job again when it has preempted the job, or when
the job's node has died.
"""

from __future__ import annotations

import os
import shlex
import subprocess
from collections.abc import MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydraloop.launch.exit import REQUEUE

_ENDS = (
    *("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED"),
    "TIMEOUT",
)
"""States of jobs that do not start again."""
_SUBMITTED = "HYDRALOOP_SUBMITTED"
"""Variable of jobs whose script starts them again."""
_AT_END = f"""code=$?
if [ $code = {REQUEUE} ] && scontrol show job "$SLURM_JOB_ID" | grep -q JobState=RUNNING; then
    scontrol requeue "$SLURM_JOB_ID" && exit
fi"""


@dataclass(frozen=True, slots=True)
class Job:
    """What Slurm says of a job."""

    id: str
    state: str
    """Such as `RUNNING`."""
    reason: str
    """Why it waits, or `None`."""
    name: str

    @property
    def has_ended(self) -> bool:
        """Return whether Slurm does not start it again."""
        return self.state in _ENDS


def start_again(parameters: MutableMapping[str, Any], folder: Path) -> None:
    """Let the script of a job start the job again, or write its exit code to a file.

    Args:
        parameters: of submitit's SlurmExecutor.
        folder: for the files, see `code`.
    """
    file = f"{shlex.quote(str(folder))}/$SLURM_JOB_ID.code"
    setup, teardown = (list(parameters.get(name) or ()) for name in ("setup", "teardown"))
    parameters["setup"] = [*setup, f"rm -f {file}", f"export {_SUBMITTED}=1", "trap : TERM"]
    parameters["teardown"] = [_AT_END, *teardown, f"echo $code >{file}", "exit $code"]


def code(folder: Path, job: str) -> int | None:
    """Return the exit code of a job whose script has ended; None while it runs, and if it was killed."""
    with suppress(OSError, ValueError):
        return int((folder / f"{job}.code").read_text(encoding="ascii"))
    return None


def queue() -> dict[str, Job] | None:
    """Return the user's jobs by their ids, with one question for all; None without an answer, which says nothing.

    Slurm forgets a job some minutes after its end.
    """
    words = ("squeue", "--me", "--noheader", "--states=all", "--format=%i|%T|%r|%j")
    try:
        done = subprocess.run(words, capture_output=True, encoding="utf-8", errors="replace", check=False)
    except OSError:
        return None
    jobs = [Job(*line.split("|", 3)) for line in done.stdout.splitlines()]
    return None if done.returncode else {job.id: job for job in jobs}


def cancel(*jobs: str) -> bool:
    """Cancel jobs by their ids. Slurm sends SIGTERM, and kills them half a minute later. Return whether it has."""
    try:
        return subprocess.run(["scancel", *jobs], capture_output=True, check=False).returncode == 0
    except OSError:
        return False


def is_submitted() -> bool:
    """Return whether this process is in a job whose script starts it again."""
    return _SUBMITTED in os.environ


def was_started_again() -> bool:
    """Return whether Slurm has started the job before under its id."""
    return is_submitted() and os.environ.get("SLURM_RESTART_COUNT", "0") != "0"
