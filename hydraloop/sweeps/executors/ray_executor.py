"""RayExecutor: runs jobs on the nodes of a Ray cluster. An actor for each job starts its process (see `ray_actor`).

Ray's own state is not asked how a job has ended: the file of the job tells it. Only Ray core is used, and only this
file imports it.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from hydraloop.errors import UserError, not_installed, use_one_of
from hydraloop.files import environment
from hydraloop.files.secrets import mask_text
from hydraloop.launch.exit import REQUEUE
from hydraloop.sweeps.executors.executor import Cause, Ended, Executor, Request
from hydraloop.sweeps.executors.gpus import Shares
from hydraloop.sweeps.executors.ray_actor import Job
from hydraloop.sweeps.executors.spawned import Spawn
from hydraloop.sweeps.job_states import LOG, UNUSABLE

log = logging.getLogger(__name__)

_KEY = "sweep.ray"
_AMOUNTS = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
"""The options for what a job reserves, and Ray's names of these resources."""
_OPTIONS = (*_AMOUNTS, "address", "runtime_env")
_OBJECTS = 100 * 2**20
"""Bytes of shared memory of a Ray that is started here. Nothing large is sent."""
_CHECK_INTERVAL = 5.0
"""Seconds between two checks that this machine is a part of the cluster."""
_EACH_NODE = "Each node must see the project's folder at the same path, and needs the same packages."


def check(options: Mapping[str, Any]) -> None:
    """Check what needs no cluster.

    Raises:
        UserError: Ray is not installed, or an option is wrong.
    """
    if find_spec("ray") is None:
        raise not_installed("ray", key="sweep.executor")
    for name in options:
        if name not in _OPTIONS:
            raise UserError("no such option", key=f"{_KEY}.{name}", remedy=use_one_of(_OPTIONS))
    if str(options.get("address") or os.environ.get("RAY_ADDRESS")).startswith("ray://"):
        raise UserError(
            "the command would not be a part of the cluster",
            key=f"{_KEY}.address",
            remedy="Run the command on a node of the cluster: ray job submit -- python train.py -m …",
        )


@dataclass(frozen=True, slots=True)
class Cluster:
    """A cluster to which this process is connected."""

    resources: Mapping[str, float]
    """What each job reserves, by the names of Ray's options."""
    shares: Shares


def connect(options: Any, *, ranks: int = 1, device: str = "auto") -> Cluster:
    """Connect this process to a cluster, or start one on this machine. Arguments: as of `gpus.shares`.

    Raises:
        UserError: there is no such cluster.
    """
    given: Any = OmegaConf.to_container(options.ray, resolve=True)
    check(given)
    before = signal.getsignal(signal.SIGTERM)
    try:
        nodes = _nodes(given.get("address"), given.get("runtime_env"))
    finally:  # Ray replaces it
        signal.signal(signal.SIGTERM, before)
    has_gpus = device != "cpu" and any("GPU" in node for node in nodes)
    resources = {"num_cpus": ranks, "num_gpus": ranks if has_gpus else 0, **given}
    resources = {name: resources[name] for name in _AMOUNTS if name in resources}
    wanted = [(_AMOUNTS[name], value) for name, value in resources.items() if value]
    room = sum(int(min(node.get(name, 0.0) / value for name, value in wanted) + 1e-6) for node in nodes)
    if not room:
        shown = ", ".join(f"{_KEY}.{name}={value:g}" for name, value in resources.items())
        log.warning("no node of the Ray cluster has room for a job (%s): jobs wait for one", shown)
    threads = max(1, int(resources["num_cpus"]) // ranks) if ranks > 1 else None  # Ray sets those of a single rank
    return Cluster(resources, Shares(options.max_workers or max(1, room), threads=threads))


def _nodes(address: str | None, runtime_env: Mapping[str, Any] | None) -> list[Mapping[str, float]]:
    """Connect, and return the resources of each node."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray would print a warning
    import ray

    quiet: Any = {"log_to_driver": False, "logging_level": logging.ERROR, "runtime_env": runtime_env}
    try:
        if address is None and "RAY_ADDRESS" not in os.environ:  # Ray would take any cluster of this machine
            log.info("Ray is started on this machine; for a cluster: %s.address=auto, or an address", _KEY)
            ray.init("local", include_dashboard=False, object_store_memory=_OBJECTS, **quiet)
        else:
            ray.init(address, **quiet)
        return [node["Resources"] for node in _alive()]
    except Exception as error:  # of Ray, for any answer of the cluster
        remedy = f"Start Ray (`ray start --head`), or name its address: {_KEY}.address=10.0.0.1:6379"
        raise UserError(_line(error), key=f"{_KEY}.address", remedy=remedy) from error


def _alive() -> list[dict[str, Any]]:
    """Return what Ray knows of each node that is alive."""
    import ray

    nodes: Any = ray.nodes()  # type: ignore[no-untyped-call]  # Ray's has no types
    return [node for node in nodes if node["Alive"]]


@dataclass(frozen=True, slots=True)
class _Job:
    """A job that was submitted."""

    number: int
    actor: Any
    ready: Any
    """Ray's reference for the start of the actor."""


class RayExecutor(Executor):
    """Runs each job in an actor. Jobs wait in Ray's queue while the cluster has no room.

    Args:
        cluster: from `connect`.
        spawn: writes the requests.
        words: the arguments of Python for a job.
        folder: where jobs run; None: where the workers of Ray do.
    """

    def __init__(self, cluster: Cluster, spawn: Spawn, words: Sequence[str], folder: str | None) -> None:
        import ray

        self._ray = ray
        self._spawn = spawn
        self._words = list(words)
        self._folder = folder
        self._node = ray.get_runtime_context().get_node_id()
        self._actor: Any = ray.remote(Job).options(**cluster.resources, max_concurrency=2)
        self._jobs: dict[Any, _Job] = {}
        """By Ray's reference for the end of the job."""
        self._ended: list[Ended] = []
        self._checked_at = time.monotonic()
        self._problem: UserError | None = None

    def wait_ready(self) -> None:
        """Do nothing: jobs wait in Ray's queue."""

    def submit(self, request: Request) -> None:
        """Start an actor for a job, see `Executor`."""
        if self._problem is not None:
            raise self._problem
        try:
            path, variables = self._spawn.write(request)
        except OSError as error:
            raise UserError(f"job {request.number} could not be started: {error}", key="hydra.sweep.dir") from error
        variables = {**variables, environment.SWEEP_JOB: str(path)}
        actor = self._actor.remote()
        end = actor.run.remote(self._words, self._folder, str(Path(request.folder, LOG)), variables)
        self._jobs[end] = _Job(request.number, actor, actor.ready.remote())

    def poll(self, seconds: float) -> list[Ended]:
        """Return the jobs that have ended, see `Executor`."""
        if time.monotonic() > self._checked_at + _CHECK_INTERVAL:
            self._check_connection()
            self._checked_at = time.monotonic()
        if not self._ended:
            self._wait(seconds)
        ended, self._ended = self._ended, []
        return ended

    def _wait(self, seconds: float) -> None:
        if not self._jobs:
            time.sleep(seconds)
            return
        done, _ = self._ray.wait([*self._jobs], timeout=seconds)
        for end in done:
            job = self._jobs.pop(end)
            try:
                answer = self._ray.get(end)
            except (self._ray.exceptions.RayTaskError, self._ray.exceptions.RuntimeEnvSetupError) as error:
                answer = _line(error)
            except self._ray.exceptions.RayError as error:
                log.warning("job %d: its Ray worker has ended: %s", job.number, _line(error))
                answer = None
            self._ray.kill(job.actor)  # gives back what it has reserved; a lost one may only be unreachable
            if isinstance(answer, str):
                self._set_problem(f"a worker cannot run jobs: {answer}")
                answer = UNUSABLE
            self._ended.append(Ended(job.number, answer, Cause.LOST if answer is None else Cause.PROCESS))

    def _check_connection(self) -> None:
        """Check that this machine is a part of the cluster. Otherwise, no call may ever be answered."""
        try:
            is_connected = self._node in [node["NodeID"] for node in _alive()]
        except Exception:  # of Ray, whose server has ended
            is_connected = False
        if not is_connected:
            remedy = f"Start it again, and continue the sweep: sweep.resume={self._spawn.sweep}"
            self._set_problem("its process on this machine (raylet) has ended", remedy)
            self._ended += [Ended(job.number, None, Cause.LOST) for job in self._jobs.values()]
            self._jobs.clear()

    def _has_started(self, job: _Job) -> bool:
        """Return whether the actor of a job has started."""
        try:
            self._ray.get(job.ready, timeout=0)
        except (self._ray.exceptions.RayError, TimeoutError):
            return False
        return True

    def cancel(self, number: int, sign: signal.Signals) -> None:
        """Send a signal to a job, see `Executor`. A job that waits for room stays queued."""
        for end, job in [*self._jobs.items()]:
            if job.number != number:
                continue
            has_started = self._has_started(job)
            if has_started and sign != signal.SIGKILL:
                job.actor.signal.remote(int(sign))
                continue
            self._ray.kill(job.actor)
            del self._jobs[end]
            self._ended.append(Ended(number, -signal.SIGKILL if has_started else REQUEUE))

    def close(self) -> None:
        """Leave the cluster. Ray kills jobs that still run."""
        self._ray.shutdown()

    def _set_problem(self, text: str, remedy: str = _EACH_NODE) -> None:
        """Start no further job."""
        self._problem = UserError(f"Ray: {mask_text(text)}", key="sweep.executor", remedy=remedy)


def _line(error: Exception) -> str:
    """Return the beginning of a message of Ray."""
    return mask_text(" ".join(str(error).split())[:300])
