"""Jobs that are new Python processes, not forks: `python train.py`, and a file with the request.

They are for `hydra.job.env_set`, whose variables libraries read when they are imported; for programs that cannot be
forked; and for other machines. The overrides are in the file, because everybody on a machine can see arguments.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from hydraloop.run_files import atomic, environment
from hydraloop.sweeps.executors.executor import LEFT, Request
from hydraloop.sweeps.states import LOG, REQUEST


class Spawn:
    """Starts jobs of a sweep on this machine.

    Args:
        sweep: its directory.
        overrides: of the sweep, as typed.
    """

    def __init__(self, sweep: Path, overrides: Sequence[str]) -> None:
        self.sweep = sweep
        self._overrides = list(overrides)

    def __call__(self, request: Request) -> subprocess.Popen[bytes]:
        """Start a job.

        Raises:
            OSError: the process could not be started.
        """
        variables = self.variables(request)
        with Path(request.folder, LOG).open("ab") as log:
            return subprocess.Popen(
                command(),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **variables, **request.variables(), **request.environment},
                start_new_session=True,
            )

    def variables(self, request: Request) -> dict[str, str]:
        """Write the file with a request, and return the environment variables that `command` needs.

        Raises:
            OSError: the file cannot be written.
        """
        path = Path(request.folder, REQUEST)
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {"sweep": str(self.sweep), "overrides": self._overrides, "request": asdict(request)}
        with atomic.replacing(path, flush=False) as unfinished:
            unfinished.touch(mode=0o600)
            unfinished.write_text(json.dumps(content), encoding="utf-8")
        return {environment.SWEEP_JOB: str(path)}


def command() -> list[str]:
    """Return the command of a job's process."""
    return [sys.executable, *environment.command()[1:]]


def received() -> tuple[Path, list[str], Request]:
    """Return the sweep's directory, its overrides as typed, and the job for which this process was started.

    Raises:
        SystemExit: another process has the job.
    """
    path = Path(os.environ.pop(environment.SWEEP_JOB))  # not for processes that the job starts
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        sys.exit(LEFT)
    request = Request.from_json(content["request"])
    os.environ.update(request.environment)
    return Path(content["sweep"]), content["overrides"], request


def take(request: Request) -> None:
    """Remove the file with a request, just before the job begins: until then, `stop` removes it.

    Raises:
        SystemExit: it was removed.
    """
    try:
        Path(request.folder, REQUEST).unlink()
    except FileNotFoundError:
        sys.exit(LEFT)
