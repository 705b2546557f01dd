"""Checks of jobs on Ray, in a process of their own: a cluster of two nodes, whose workers and nodes are killed.

`python ray_program.py <folder>` prints the errors of the checks as JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path

import psutil
import ray
from omegaconf import OmegaConf

from hydraloop.errors import UserError
from hydraloop.schemas.sweep import SweepConf
from hydraloop.sweeps.executors import ray_executor
from hydraloop.sweeps.executors.executor import Cause, Ended, Request
from hydraloop.sweeps.executors.spawned import Spawn
from hydraloop.sweeps.job_states import UNUSABLE
from tests.faults.sweeps.ray_cluster import QUIET, add_node, new_cluster
from tests.sweeps.executors import program
from tests.sweeps.executors.pool_program import until

FOLDER = Path(sys.argv[1])
CHECK = ""
SECRET = "sk-very-secret"
PATIENCE = 90.0
"""Seconds for a worker of Ray to start, on a busy machine."""


def connected() -> ray_executor.Cluster:
    return ray_executor.connect(OmegaConf.structured(SweepConf(ray={"address": CLUSTER_OF_RAY.address})))


def executor(folder: str | None = None) -> ray_executor.RayExecutor:
    spawn = Spawn(FOLDER, [f"token={SECRET}"])
    return ray_executor.RayExecutor(CLUSTER, spawn, [str(program.__file__)], folder or os.getcwd())


def job(number: int, *lines: str, attempts: int = 0) -> Request:
    return Request(number, lines, str(FOLDER / f"{CHECK}-{number}"), "", attempts)


def until_ended(made: ray_executor.RayExecutor, count: int) -> list[Ended]:
    found: list[Ended] = []
    until(lambda: found.extend(made.poll(0.5)) or len(found) >= count, PATIENCE)
    return sorted(found, key=lambda end: end.number)


def begun(request: Request, made: ray_executor.RayExecutor) -> psutil.Process:
    """Return the process of a job, when it has started."""
    about = Path(request.folder, "about.json")
    until(
        lambda: made.poll(0.1) == [] and about.exists() and "lines:" in about.with_name("job.log").read_text(), PATIENCE
    )
    time.sleep(0.2)  # until its last handler is set
    return psutil.Process(json.loads(about.read_text())["pid"])


def jobs_end_once_each_with_its_code() -> None:
    made = executor()
    for number in range(8):
        made.submit(job(number, f"exit={number}"))
    assert until_ended(made, 8) == [Ended(number, number) for number in range(8)]


def a_job_has_its_environment_and_its_log() -> None:
    made, request = executor(), job(3, "exit=0")
    made.submit(request)
    assert until_ended(made, 1) == [Ended(3, 0)]
    assert Path(request.folder, "job.log").read_text() == "lines: exit=0\n"


def signals_reach_a_job() -> None:
    made = executor()
    for number, (sign, code) in enumerate(((signal.SIGTERM, 75), (signal.SIGINT, -2), (signal.SIGKILL, -9))):
        request = job(number, "saves", "sleep=60")
        made.submit(request)
        process = begun(request, made)
        assert os.getsid(process.pid) == process.pid
        made.cancel(number, sign)
        assert until_ended(made, 1) == [Ended(number, code)]
        until(lambda process=process: not process.is_running(), PATIENCE)


def a_job_that_waits_for_room_stays_queued_when_it_is_cancelled() -> None:
    made, requests = executor(), [job(number, "sleep=60") for number in range(3)]
    for request in requests[:2]:  # there is room for two
        made.submit(request)
        begun(request, made)
    made.submit(requests[2])
    made.cancel(2, signal.SIGTERM)
    assert until_ended(made, 1) == [Ended(2, 75)]
    for number in range(2):
        made.cancel(number, signal.SIGKILL)
    assert until_ended(made, 2) == [Ended(number, -signal.SIGKILL) for number in range(2)]


def the_job_of_a_killed_worker_saves_and_is_lost() -> None:
    made, request = executor(), job(0, "saves", "sleep=60")
    made.submit(request)
    process = begun(request, made)
    process.parent().kill()
    assert until_ended(made, 1) == [Ended(0, None, Cause.LOST)]
    until(Path(request.folder, "saved").exists, PATIENCE)


def the_job_of_a_lost_node_is_lost_and_another_node_runs_the_next() -> None:
    made, requests = executor(), [job(number, "sleep=60") for number in range(2)]
    processes = []
    for request in requests:
        made.submit(request)
        processes.append(begun(request, made))
    node = NODES.pop()
    raylet = next(one.process.pid for one in node.all_processes["raylet"])
    (lost,) = [number for number, process in enumerate(processes) if raylet in [one.pid for one in process.parents()]]
    CLUSTER_OF_RAY.remove_node(node, allow_graceful=False)
    assert until_ended(made, 1) == [Ended(lost, None, Cause.LOST)]
    until(lambda: not processes[lost].is_running(), PATIENCE)
    until(lambda: sum(node["Alive"] for node in ray.nodes()) == 2, PATIENCE)
    made.submit(job(2, "exit=5"))  # it waits for the room of the other job
    made.cancel(1 - lost, signal.SIGTERM)
    found = until_ended(made, 2)
    assert found == [Ended(1 - lost, 143), Ended(2, 5)], found


def a_node_without_the_folder_is_an_error() -> None:
    made = executor("/nowhere")
    made.submit(job(0, "exit=0"))
    assert until_ended(made, 1) == [Ended(0, UNUSABLE)]
    assert "a worker cannot run jobs: " in refused(made)


def refused(made: ray_executor.RayExecutor) -> str:
    try:
        made.submit(job(9, "exit=0"))
    except UserError as error:
        return str(error)
    return ""


def no_secret_is_in_a_file() -> None:
    made = executor()
    made.submit(job(0, "exit=0", f"password={SECRET}"))
    assert until_ended(made, 1) == [Ended(0, 0)]
    files = [path for path in FOLDER.rglob("*") if path.is_file() and path.name != "job.log"]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def the_end_of_the_command_ends_its_jobs() -> None:
    made, request = executor(), job(0, "sleep=60")
    made.submit(request)
    process = begun(request, made)
    made.close()
    until(lambda: not process.is_running(), PATIENCE)


def the_end_of_ray_on_this_machine_is_told() -> None:
    """The job is lost, and the next one is refused. Ray itself would wait for it forever."""
    global CLUSTER
    CLUSTER = connected()
    made, request = executor(), job(0, "sleep=60")
    made.submit(request)
    begun(request, made)
    for one in CLUSTER_OF_RAY.head_node.all_processes["raylet"]:
        psutil.Process(one.process.pid).kill()
    assert until_ended(made, 1) == [Ended(0, None, Cause.LOST)]
    until(lambda: made.poll(0.5) == [] and made._problem is not None, PATIENCE)
    assert "Ray: its process on this machine (raylet) has ended" in refused(made)


CHECKS = [
    a_job_has_its_environment_and_its_log,
    jobs_end_once_each_with_its_code,
    signals_reach_a_job,
    a_job_that_waits_for_room_stays_queued_when_it_is_cancelled,
    the_job_of_a_killed_worker_saves_and_is_lost,
    a_node_without_the_folder_is_an_error,
    no_secret_is_in_a_file,
    the_job_of_a_lost_node_is_lost_and_another_node_runs_the_next,
    the_end_of_the_command_ends_its_jobs,
    the_end_of_ray_on_this_machine_is_told,
]

if __name__ == "__main__":
    os.environ |= QUIET
    began = time.monotonic()
    CLUSTER_OF_RAY = new_cluster(str(FOLDER / "ray"))
    NODES = [add_node(CLUSTER_OF_RAY, 1) for _ in range(2)]
    CLUSTER = connected()
    assert CLUSTER.shares.workers == 2
    print("cluster", round(time.monotonic() - began, 2), file=sys.stderr)
    errors: dict[str, str] = {}
    for check in CHECKS:
        begin, CHECK = time.monotonic(), check.__name__
        try:
            check()
        except BaseException:
            errors[check.__name__] = traceback.format_exc()
        print(check.__name__, round(time.monotonic() - begin, 2), file=sys.stderr, flush=True)
    ray.shutdown()
    CLUSTER_OF_RAY.shutdown()
    print(json.dumps(errors))
