"""System metrics of machines without rank 0: starts a process on each of them."""

from __future__ import annotations

import json
import logging
import os
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop.run.environment import shown
from hydraloop.run.processes import started
from hydraloop.tracking.follower.locks import FOLDER
from hydraloop.tracking.follower.spawning import MARGIN, spawn
from hydraloop.tracking.tracker import UnusableError

if TYPE_CHECKING:
    from hydraloop.engine.distributed.comm import Distributed

log = logging.getLogger(__name__)

_PATIENCE = 2.0
"""Seconds after the run's end in which a point can still be sent."""


class NodeProcess:
    """Starts and ends `node.py`. Does not raise its errors, but logs one line at the end.

    Args:
        name: name of the hook, for messages.
        run_dir: directory of the run, the same path on all machines. The process's log is written there.
        experiment: name of the run's experiment.
        options: the hook's options. They may contain a password, so they are sent through a pipe.
        node: number of the machine.
    """

    def __init__(self, name: str, run_dir: Path, experiment: str, options: Mapping[str, Any], node: int) -> None:
        self._name, self._errors = name, run_dir / FOLDER / f"{name}.node_{node}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._given = {
            "options": dict(options),
            "experiment": experiment,
            "run_dir": str(run_dir.absolute()),
            "node": node,
            "flush_timeout": _PATIENCE,
            "training": (os.getpid(), started(os.getpid())),
        }

    def start(self) -> None:
        """Start the process. It finds the run as soon as rank 0's follower has created it."""
        try:
            self._errors.parent.mkdir(parents=True, exist_ok=True)
            with self._errors.open("ab") as errors:
                pipes = (subprocess.PIPE, subprocess.DEVNULL, errors.fileno())
                self._process = spawn("hydraloop.tracking.mlflow.node", pipes=pipes)
            assert self._process.stdin is not None, "it is a pipe"
            self._process.stdin.write(json.dumps(self._given).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            log.warning("%s: no system metrics of this machine: %s", self._name, error)

    def stop(self) -> None:
        """End the process in bounded time. May be repeated."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None, "it is a pipe"
        with process:
            with suppress(OSError):
                process.stdin.close()
            try:
                process.wait(timeout=_PATIENCE + MARGIN + 0.5)
            except subprocess.TimeoutExpired:  # it may still be importing its library
                process.kill()
                return
        if process.returncode != 0:
            log.warning("%s: system metrics of this machine are missing, see %s", self._name, shown(self._errors))


def warn_of_file(name: str, options: Mapping[str, Any], distributed: Distributed) -> None:
    """Warn that other machines find a database file only in a shared folder."""
    if distributed.local_world_size >= distributed.world_size:
        return
    from hydraloop.tracking.mlflow.address import address_of, sqlite_path

    with suppress(UnusableError):  # the follower reports it
        path = sqlite_path(address_of(options, {}))
        if path is not None:
            log.warning(
                "%s: system_metrics_nodes: other machines find %s only if all machines share its folder; better use a "
                "server: hooks.%s.tracking_uri=http://…",
                name,
                shown(path),
                name,
            )
