"""System metrics of the machines that rank 0 is not on: the training side, a process on each of them."""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydraloop.engine.report.summary import shown
from hydraloop.tracking.follower.inbox import MARGIN
from hydraloop.tracking.follower.locks import FOLDER
from hydraloop.tracking.follower.spawning import spawn
from hydraloop.tracking.tracker import UnusableError

if TYPE_CHECKING:
    from hydraloop.engine.distributed.comm import Distributed

log = logging.getLogger(__name__)

_PATIENCE = 2.0
"""Seconds after the run's end that a point which is just being sent may take."""


class NodeProcess:
    """Starts `mlflow_node.py`, and ends it. Its errors are told at the end, in a line; none is raised.

    Args:
        name: of the hook, for messages.
        run_dir: the same path on all machines; the process's own log is written there.
        experiment: name of the run's.
        options: of the hook; they may hold a password, so they go through a pipe.
        node: the machine's number.
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
        }

    def start(self) -> None:
        """Start it; it finds the run by itself as soon as rank 0's follower has made it."""
        try:
            self._process = spawn("hydraloop.tracking.mlflow.node", errors=self._errors)
            assert self._process.stdin is not None, "it is a pipe"
            self._process.stdin.write(json.dumps(self._given).encode() + b"\n")
            self._process.stdin.flush()
        except OSError as error:
            log.warning("%s: no system metrics of this machine: %s", self._name, error)

    def stop(self) -> None:
        """End it, in bounded time; may be repeated."""
        process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None, "it is a pipe"
        with process:
            with suppress(OSError):
                process.stdin.close()
            try:
                process.wait(timeout=_PATIENCE + MARGIN + 0.5)
            except subprocess.TimeoutExpired:  # it has not even begun
                process.kill()
                return
        if process.returncode != 0:
            log.warning("%s: system metrics of this machine are missing, see %s", self._name, shown(self._errors))


def warn_of_file(name: str, options: Mapping[str, Any], distributed: Distributed) -> None:
    """Say that a database in a file is there for other machines only in a folder that they share."""
    if distributed.local_world_size >= distributed.world_size:
        return
    from hydraloop.tracking.mlflow.address import address_of, sqlite_path

    with suppress(UnusableError):  # which the follower says
        path = sqlite_path(address_of(options, {}))
        if path is not None:
            log.warning(
                "%s: system_metrics_nodes: the other machines find %s only in a folder that all share; a server is "
                "safer: hooks.%s.tracking_uri=http://…",
                name,
                shown(path),
                name,
            )
