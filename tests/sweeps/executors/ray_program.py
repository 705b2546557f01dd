"""Checks of jobs on Ray, in a process of their own: a cluster of two nodes, whose workers and nodes are killed.

`python ray_program.py <folder> <jobs>` prints the errors of the checks as JSON. With `serve`, it is what the workers
start instead of `python train.py`: a server whose jobs need neither torch nor a config.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import traceback
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import psutil
import ray
from omegaconf import OmegaConf

from hydraloop.run_files import environment
from hydraloop.schemas.sweep import SweepConf
from hydraloop.sweeps.executors import fork_server, ray_executor
from hydraloop.sweeps.executors.executor import LEFT, Ended, Request
from tests.faults.sweeps.ray_cluster import QUIET, add_node, new_cluster
from tests.sweeps.executors.pool_program import Worker, processes, refused, until

FOLDER = Path(sys.argv[1])
SECRET = "sk-very-secret"
PATIENCE = 90.0
"""Seconds for a worker of Ray to start, on a busy machine."""


class Saving(Worker):
    """In addition, a job that saves when it is told to end."""

    def save(self, request: Request) -> None:
        def handle(number: int, frame: object) -> None:
            Path(request.folder + ".saved").touch()
            os._exit(75)

        signal.signal(signal.SIGTERM, handle)
        self.sleep(request)


def serve() -> None:
    """Fork jobs, as `received._serve_jobs` does."""
    connection = Connection(int(os.environ.pop(environment.SWEEP_SERVER)))
    begin = fork_server.receive(connection)
    if begin.get("fails"):
        sys.exit("no module named torch")
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    os._exit(fork_server.Server(Saving(), connection).serve())


def executor(variables: ray_executor.Variables | None = None, **begin: object) -> ray_executor.RayExecutor:
    """Return one whose close leaves this process connected."""
    setup = {"command": [__file__, str(FOLDER), "serve"], "folder": os.getcwd(), "begin": begin}
    made = ray_executor.RayExecutor(CLUSTER, setup, variables)
    made.close = lambda: [ray.kill(slot.actor) for slot in made._slots]  # type: ignore[method-assign]
    return made


def job(number: int, *lines: str, attempts: int = 0) -> Request:
    return Request(number, lines, str(FOLDER / f"{sys._getframe(1).f_code.co_name}-{number}"), attempts)


def until_ended(made: ray_executor.RayExecutor, count: int) -> list[Ended]:
    found: list[Ended] = []
    until(lambda: found.extend(made.poll(0.5)) or len(found) >= count, PATIENCE)
    return sorted(found, key=lambda end: end.number)


def worker_of(request: Request, made: ray_executor.RayExecutor) -> psutil.Process:
    """Return the worker of Ray whose server has forked a job, when it has started."""
    until(lambda: made.poll(0.1) == [] and Path(request.folder).exists(), PATIENCE)
    return psutil.Process(json.loads(Path(request.folder).read_text())[0]).parents()[1]


def many_short_jobs_end_once_each_with_its_code() -> None:
    made, count = executor(), int(sys.argv[2])
    made.wait_ready()
    waiting, running, found = list(range(count)), set[int](), list[Ended]()
    while len(found) < count:
        while waiting and len(running) < 2:
            number = waiting.pop()
            running.add(number)
            made.submit(job(number, "code", str(number % 100)))
        for end in made.poll(1.0):
            running.remove(end.number)
            found.append(end)
    assert sorted(found, key=lambda end: end.number) == [Ended(number, number % 100) for number in range(count)]
    made.close()


def a_job_looks_like_a_single_run_and_its_variables_are_set() -> None:
    made = executor(lambda request: {"OMP_NUM_THREADS": "7"} if request.number else {})
    for number in range(2):
        made.submit(job(number, "tell"))
    assert until_ended(made, 2) == [Ended(0, 0), Ended(1, 0)]
    told = [
        json.loads((FOLDER / f"a_job_looks_like_a_single_run_and_its_variables_are_set-{n}").read_text())
        for n in (0, 1)
    ]
    assert [one.pop("threads") for one in told] == ["1", "7"]
    common = {"session": True, "server": True, "stdin": "", "interrupt": True, "child": True, "length": 4}
    assert [one.pop("gpus") or "" for one in told] == ["", ""]
    assert told == [common, common]
    made.close()


def signals_reach_a_job_also_before_it_has_started() -> None:
    made = executor()
    made.wait_ready()
    first = job(0, "sleep")
    made.submit(first)
    made.cancel(0, signal.SIGINT)
    assert until_ended(made, 1)[0].code in (130, -signal.SIGINT)
    again = job(0, "sleep", attempts=1)
    Path(again.folder).unlink(missing_ok=True)
    made.submit(again)
    alive = processes_of(again)
    made.cancel(0, signal.SIGKILL)
    assert until_ended(made, 1) == [Ended(0, -signal.SIGKILL)]
    until(lambda: not any(is_there() for is_there in alive))
    made.close()


def processes_of(request: Request) -> list[Any]:
    until(lambda: Path(request.folder).exists(), PATIENCE)
    return processes(request)


def a_job_that_waits_for_room_stays_queued_when_it_is_cancelled() -> None:
    made = executor()
    for number in range(3):  # there is room for two
        made.submit(job(number, "sleep"))
    until(lambda: made.poll(0.1) == [] and sum(slot.job is not None for slot in made._slots) == 2, PATIENCE)
    (waiting,) = [request.number for request in made._waiting]
    made.cancel(waiting, signal.SIGTERM)
    assert made.poll(0) == [Ended(waiting, LEFT)]
    others = {0, 1, 2} - {waiting}
    for number in others:
        until((FOLDER / f"a_job_that_waits_for_room_stays_queued_when_it_is_cancelled-{number}").exists)
        made.cancel(number, signal.SIGTERM)
    assert {end.number for end in until_ended(made, 2)} == others
    made.close()


def the_job_of_a_killed_worker_or_server_dies_and_is_lost() -> None:
    made = executor()
    for number, server in enumerate((False, True)):
        request = job(number, "save")
        made.submit(request)
        worker = worker_of(request, made)
        (task, *_) = processes(request)
        victim = psutil.Process(json.loads(Path(request.folder).read_text())[0]).parent() if server else worker
        assert victim is not None
        victim.kill()
        assert until_ended(made, 1) == [Ended(number, None, is_lost=True)]
        until(lambda task=task: not task())
        assert Path(request.folder + ".saved").exists()
    made.submit(job(2, "code", "5"))
    assert until_ended(made, 1) == [Ended(2, 5)]
    made.close()


def the_job_of_a_lost_node_is_lost_and_another_node_runs_the_next() -> None:
    made = executor()
    requests = [job(number, "sleep") for number in range(2)]
    for request in requests:
        made.submit(request)
    workers = [worker_of(request, made) for request in requests]
    node = NODES.pop()
    raylet = next(one.process.pid for one in node.all_processes["raylet"])
    (lost,) = [number for number, worker in enumerate(workers) if raylet in [one.pid for one in worker.parents()]]
    alive = processes(requests[lost])[0]
    CLUSTER_OF_RAY.remove_node(node, allow_graceful=False)
    assert until_ended(made, 1) == [Ended(lost, None, is_lost=True)]
    until(lambda: not alive())
    made.submit(job(2, "code", "5"))  # it waits for the slot of the other job
    made.cancel(1 - lost, signal.SIGTERM)
    assert until_ended(made, 2) == [Ended(1 - lost, -signal.SIGTERM), Ended(2, 5)]
    made.close()


def a_server_that_cannot_be_prepared_is_an_error() -> None:
    made = executor(fails=True, secret=SECRET)
    assert "cannot run jobs: " in (text := refused(made.wait_ready)), text
    assert "no module named torch" in text
    assert "no module named torch" in refused(lambda: made.submit(job(0, "code", "0")))
    made.close()


def no_secret_is_in_a_file_of_ray() -> None:
    made = executor(secret=SECRET)
    made.submit(job(0, "code", "0", SECRET))
    assert until_ended(made, 1) == [Ended(0, 0)]
    made.close()
    files = [path for path in FOLDER.joinpath("ray").rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if SECRET.encode() in path.read_bytes()] == []


def the_end_of_the_command_ends_its_jobs() -> None:
    request = job(0, "save")
    made = executor()
    made.submit(request)
    worker_of(request, made)
    alive = processes(request)[0]
    ray.shutdown()
    until(lambda: not alive())
    assert Path(request.folder + ".saved").exists()


CHECKS = [
    a_job_looks_like_a_single_run_and_its_variables_are_set,
    many_short_jobs_end_once_each_with_its_code,
    signals_reach_a_job_also_before_it_has_started,
    a_job_that_waits_for_room_stays_queued_when_it_is_cancelled,
    the_job_of_a_killed_worker_or_server_dies_and_is_lost,
    a_server_that_cannot_be_prepared_is_an_error,
    no_secret_is_in_a_file_of_ray,
    the_job_of_a_lost_node_is_lost_and_another_node_runs_the_next,
    the_end_of_the_command_ends_its_jobs,
]

if __name__ == "__main__":
    if sys.argv[2] == "serve":
        serve()
    os.environ |= QUIET
    began = time.monotonic()
    CLUSTER_OF_RAY = new_cluster(str(FOLDER / "ray"))
    NODES = [add_node(CLUSTER_OF_RAY, 1) for _ in range(2)]
    CLUSTER = ray_executor.connect(OmegaConf.structured(SweepConf(ray={"address": CLUSTER_OF_RAY.address})))
    assert CLUSTER.shares.workers == 2
    print("cluster", round(time.monotonic() - began, 2), file=sys.stderr)
    errors: dict[str, str] = {}
    for check in CHECKS:
        begin = time.monotonic()
        try:
            check()
        except BaseException:
            errors[check.__name__] = traceback.format_exc()
        print(check.__name__, round(time.monotonic() - begin, 2), file=sys.stderr, flush=True)
    ray.shutdown()
    CLUSTER_OF_RAY.shutdown()
    print(json.dumps(errors))
