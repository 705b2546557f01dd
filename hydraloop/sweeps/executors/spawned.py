"""Jobs that are new Python processes, not forks: `python train.py`, and a file with the request.

They are for programs that cannot be forked, and for other machines. The overrides are in the file, because everybody on
a machine can see arguments. The secrets in them are in the environment of the process. The job composes its config: as
text, a config has no types.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from hydraloop.errors import UserError
from hydraloop.files import atomic, environment
from hydraloop.files.secrets import masked_lists, put_secrets_back
from hydraloop.launch.termination import end_with
from hydraloop.sweeps.executors.executor import Request
from hydraloop.sweeps.job_states import LOG, REQUEST


class Spawn:
    """Starts jobs of a sweep on this machine.

    Args:
        sweep: its directory.
        overrides: of the sweep, as typed.
    """

    def __init__(self, sweep: Path, overrides: Sequence[str]) -> None:
        self.sweep, self._overrides = sweep, overrides

    def __call__(self, request: Request) -> subprocess.Popen[bytes]:
        """Start a job.

        Raises:
            OSError: the process could not be started.
        """
        path, variables = self.write(request)
        with Path(request.folder, LOG).open("ab") as log:
            return subprocess.Popen(
                command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    **variables,
                    environment.SWEEP_JOB: str(path),
                    environment.SWEEP_OWNER: str(os.getpid()),
                },
                start_new_session=True,
            )

    def write(self, request: Request) -> tuple[Path, dict[str, str]]:
        """Write the file with a request. Return its path, and the environment variables of the job.

        Raises:
            OSError: the file cannot be written.
        """
        path = Path(request.folder, REQUEST)
        path.parent.mkdir(parents=True, exist_ok=True)
        given = {"sweep": str(self.sweep), **asdict(request)}
        private = write_masked(path, given, overrides=list(self._overrides), lines=list(request.lines))
        return path, {**request.variables(), **private}


def write_masked(path: Path, content: Mapping[str, Any], **overrides: list[str]) -> dict[str, str]:
    """Write a file with overrides, whose secrets are masked. Return the environment variables with the secrets.

    Raises:
        OSError: the file cannot be written.
    """
    shown, secrets = masked_lists(overrides)
    atomic.write_text(path, json.dumps({**content, **shown, "has_secrets": bool(secrets)}), flush=False)
    return secrets


def read_masked(path: Path) -> dict[str, Any]:
    """Return what `write_masked` has written, with the secrets that the environment has.

    Raises:
        OSError: the file cannot be read.
        UserError: the secrets are missing.
    """
    content: dict[str, Any] = json.loads(path.read_bytes())
    is_complete = put_secrets_back(content)
    if content.pop("has_secrets") and not is_complete:
        raise UserError(
            "the overrides have a secret, which the environment of this job does not have",
            key="sweep.submitit",
            remedy="Let sbatch export the environment. Or set a variable on each machine: '++key=${oc.env:VARIABLE}'",
        )
    return content


def command() -> list[str]:
    """Return the command of a job's process."""
    return [sys.executable, *environment.command()[1:]]


def read_request() -> tuple[Path, list[str], Request]:
    """Return the sweep's directory, its overrides as typed, and the job for which this process was started.

    From then on, this process gets SIGTERM when its owner ends. Slurm's jobs have none.

    Raises:
        SystemExit: the job has ended.
        UserError: the secrets of the job are missing.
    """
    owner = os.environ.pop(environment.SWEEP_OWNER, None)
    if owner is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, ())  # Ray blocks Ctrl-C
        end_with(int(owner))
    try:
        content = read_masked(Path(os.environ.pop(environment.SWEEP_JOB)))  # not for processes of the job
    except FileNotFoundError:
        sys.exit(0)
    sweep, overrides = Path(content.pop("sweep")), content.pop("overrides")
    return sweep, overrides, Request.from_json(content)
