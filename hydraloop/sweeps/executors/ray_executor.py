"""RayExecutor: runs jobs on the nodes of a Ray cluster. An actor for each slot keeps a fork server (see `ray_slot`).

Ray's own state is not asked how a job has ended: the file of the job tells it. Only Ray core is used, and only this
file and `doctor` import it.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from typing import Any

from omegaconf import OmegaConf

from hydraloop.errors import UserError, not_installed, use_one_of
from hydraloop.safety.secrets import mask_text
from hydraloop.sweeps.executors.executor import LEFT, Ended, Executor, Request
from hydraloop.sweeps.executors.gpus import Shares
from hydraloop.sweeps.executors.ray_slot import Slot, look

log = logging.getLogger(__name__)

_KEY = "sweep.ray"
_AMOUNTS = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
"""The options for what a job reserves, and Ray's names of these resources."""
_OPTIONS = (*_AMOUNTS, "address", "runtime_env")
_OBJECTS = 100 * 2**20
"""Bytes of shared memory of a Ray that is started here. Nothing large is sent."""
_FIRST = 60.0
"""Seconds to wait for the first slot. Later, jobs wait for room in the cluster, as in a queue."""
_IDLE = 10.0
"""Seconds after which a slot without a job is given back to the cluster."""
_LOST = 3
"""Workers that end, one after the other, before they can run a job, until this is an error."""
_EACH_NODE = "Each node needs the project's folder and its packages: python -m hydraloop doctor sweep.executor=ray"

Variables = Callable[[Request], dict[str, str]]
"""Returns the `hydra.job.env_set` of a job."""


def check(options: Mapping[str, Any]) -> None:
    """Check what needs no cluster.

    Raises:
        UserError: Ray is not installed, or an option is wrong.
    """
    if find_spec("ray") is None:
        raise not_installed("ray", key="sweep.executor")
    if sys.platform != "linux":
        raise UserError("jobs on Ray need Linux", key="sweep.executor", remedy="Run the command on a node.")
    for name, value in options.items():
        if name not in _OPTIONS:
            raise UserError("no such option", key=f"{_KEY}.{name}", remedy=use_one_of(_OPTIONS, name))
        least = 0.0 if name == "num_gpus" else 1e-4
        if name in _AMOUNTS and not (isinstance(value, int | float) and value >= least):
            example = 8 * 10**9 if name == "memory" else 1
            problem, remedy = f"{value!r} is not a positive number", f"For example: {_KEY}.{name}={example}"
            raise UserError(problem, key=f"{_KEY}.{name}", remedy=remedy)
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


def looks(folder: str, token: str) -> list[dict[str, Any]]:
    """Return what each node of the cluster has, see `ray_slot.look`, and disconnect. For `doctor`.

    Raises:
        UserError: a node does not answer, or cannot import hydraloop.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    task: Any = ray.remote(look)
    places = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in _alive()]
    try:
        calls = [task.options(num_cpus=0, scheduling_strategy=place).remote(folder, token) for place in places]
        found: list[dict[str, Any]] = ray.get(calls, timeout=_FIRST)
        return found
    except ray.exceptions.RayError as error:
        raise UserError(f"a node cannot run jobs: {_line(error)}", key="sweep.executor", remedy=_EACH_NODE) from error
    finally:
        ray.shutdown()


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


@dataclass(eq=False)
class _Slot:
    """An actor, and what it does."""

    actor: Any
    job: Request | None = None
    is_ready: bool = False
    idle_since: float = 0.0


class RayExecutor(Executor):
    """Runs jobs in actors, which are started when jobs need them.

    Args:
        cluster: from `connect`.
        setup: for `Slot.prepare`.
        variables: None if no job sets any.
    """

    def __init__(self, cluster: Cluster, setup: Mapping[str, Any], variables: Variables | None = None) -> None:
        import ray

        self._ray, self._setup, self._variables = ray, dict(setup), variables
        self._actor: Any = ray.remote(Slot).options(**cluster.resources, max_concurrency=2)
        self._slots: list[_Slot] = []
        self._calls: dict[Any, _Slot] = {}
        self._waiting: deque[Request] = deque()
        self._ended: list[Ended] = []
        self._lost = 0
        """Workers that have ended before they could run a job, one after the other."""
        self._problem: UserError | None = None

    def wait_ready(self) -> None:
        """Wait until a job can start within milliseconds, or until it is clear that the cluster has no room now.

        Raises:
            UserError: a worker cannot run jobs.
        """
        until = time.monotonic() + _FIRST
        self._add_slot()
        while not any(slot.is_ready for slot in self._slots) and time.monotonic() < until:
            self._wait(1.0)
            self._raise()

    def submit(self, request: Request) -> None:
        """Give a job to a slot, or queue it, see `Executor`."""
        self._raise()
        self._waiting.append(request)
        self._assign()

    def poll(self, seconds: float) -> list[Ended]:
        """Return the jobs that have ended, see `Executor`."""
        if not self._ended:
            self._wait(seconds)
            self._assign()
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, number: int, sign: signal.Signals) -> None:
        """Send a signal to a job, see `Executor`. A job that waits for a slot stays queued."""
        for request in [request for request in self._waiting if request.number == number]:
            self._waiting.remove(request)
            self._ended.append(Ended(number, LEFT))
        for slot in self._slots:
            if slot.job is not None and slot.job.number == number:
                slot.actor.signal.remote((number, slot.job.attempts), int(sign))

    def close(self) -> None:
        """Leave the cluster. Jobs that still run save and end."""
        self._ray.shutdown()

    def _raise(self) -> None:
        if self._problem is not None:
            raise self._problem

    def _assign(self) -> None:
        """Give waiting jobs to slots, start slots for the others, and give back slots that are idle."""
        now = time.monotonic()
        for slot in [slot for slot in self._slots if slot.is_ready and slot.job is None]:
            if self._waiting:
                slot.job = self._waiting.popleft()
                variables = {} if self._variables is None else self._variables(slot.job)
                self._calls[slot.actor.run.remote(asdict(slot.job), variables)] = slot
            elif now > slot.idle_since + _IDLE:
                self._slots.remove(slot)
                self._ray.kill(slot.actor)
        for _ in range(len(self._waiting) - sum(not slot.is_ready for slot in self._slots)):
            self._add_slot()

    def _add_slot(self) -> None:
        slot = _Slot(self._actor.remote())
        self._slots.append(slot)
        self._calls[slot.actor.prepare.remote(self._setup, {})] = slot

    def _wait(self, seconds: float) -> None:
        """Wait for an answer of a slot, and take it."""
        if not self._calls:
            time.sleep(seconds)
            return
        done, _ = self._ray.wait([*self._calls], timeout=seconds)
        for call in done:
            slot = self._calls.pop(call)
            try:
                self._answered(slot, self._ray.get(call))
            except self._ray.exceptions.RayError as error:
                self._slot_lost(slot, error)

    def _answered(self, slot: _Slot, answer: int | str | None) -> None:
        job, slot.job, slot.is_ready, slot.idle_since = slot.job, None, True, time.monotonic()
        if isinstance(answer, str):
            self._set_problem(answer)
            answer = LEFT
        self._lost = 0
        if job is not None:
            self._ended.append(Ended(job.number, answer))

    def _slot_lost(self, slot: _Slot, error: Exception) -> None:
        """Note that a worker, or its node, has ended."""
        self._slots.remove(slot)
        if slot.job is not None:
            log.warning("job %d: its Ray worker has ended: %s", slot.job.number, _line(error))
            self._ended.append(Ended(slot.job.number, None, is_lost=True))
            return
        self._lost += 1
        if self._lost == _LOST:
            self._set_problem(_line(error))

    def _set_problem(self, text: str) -> None:
        """Start no further job."""
        problem = f"a worker of Ray cannot run jobs: {mask_text(text)}"
        self._problem = UserError(problem, key="sweep.executor", remedy=_EACH_NODE)
        self._ended += [Ended(request.number, LEFT) for request in self._waiting]
        self._waiting.clear()


def _line(error: Exception) -> str:
    """Return the beginning of a message of Ray."""
    return mask_text(" ".join(str(error).split())[:300])
