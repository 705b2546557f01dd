"""System metrics of a machine without rank 0: the process that logs them, and a job on two nodes."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from mlflow import MlflowClient

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.tracking.mlflow.nodes import NodeProcess, warn_of_file
from hydraloop.tracking.mlflow.tracker import MLflowTracker
from hydraloop.tracking.tracker import Finish, Run
from tests.e2e.projects import REPOSITORY, Project
from tests.e2e.test_launching import free_port, processes
from tests.processes import children, command_line
from tests.tracking.mlflow.runs import QUIET, attempt, client, empty_database, folder, opened, run_in
from tests.tracking.mlflow.server import mlflow_server

__all__ = ["empty_database", "folder"]
pytestmark = QUIET
CPU = "system/node_1/cpu_utilization_percentage"
SOON = 120.0
UNTIL = '''
import time
from pathlib import Path

from hydraloop import Hook


class Until(Hook):
    """Ends the run when a file exists. Until then, epochs are slow, so that records are sent soon."""

    def after_train_epoch(self, engine) -> None:
        time.sleep(0.2)
        if Path("enough").exists():
            engine.request_stop("it is enough")
'''


def until(met: Callable[[], Any], what: str) -> None:
    """Wait until `met` returns something true."""
    deadline = time.monotonic() + SOON
    while not met():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def nodes(of: psutil.Process | None = None) -> list[psutil.Process]:
    """Running processes of nodes among the children of a process."""
    return [one for one, command in children(of).items() if any("tracking.mlflow.node" in word for word in command)]


def started_node(of: psutil.Process | None = None) -> psutil.Process:
    """The process of the only node. A new process has its command line after a moment."""
    until(lambda: nodes(of), "no node")
    (started,) = nodes(of)
    return started


def described(path: Path) -> Run:
    """A run as rank 0 describes it."""
    first = attempt()
    return run_in(path, replace(first, tags={**first.tags, "run_dir": str(path)}))


def process(run_dir: Path, **options: Any) -> NodeProcess:
    """The process of node 1."""
    given = {"tracking_uri": None, "folder": str(Path.cwd()), "system_metrics_interval": 0.5, **options}
    return NodeProcess("mlflow", run_dir, "digits", given, 1)


def logged(tracker: MLflowTracker, key: str = CPU) -> list[int]:
    """Steps of a metric's points."""
    return [point.step for point in client().get_metric_history(tracker.memory["run_id"], key)]


@pytest.mark.slow
def test_points_begin_with_the_run_and_continue_after_those_of_an_earlier_attempt(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = folder / "it's a run"
    run = described(path)
    node = process(path)
    node.start()
    started = started_node()
    tracker = opened(run)
    until(lambda: logged(tracker), "no points")
    node.stop()
    node.stop()
    assert not started.is_running()
    first = logged(tracker)
    assert first == list(range(len(first)))
    keys = client().get_run(tracker.memory["run_id"]).data.metrics
    assert all(key.startswith("system/node_1/") for key in keys)

    node = process(path)
    node.start()
    until(lambda: len(logged(tracker)) > len(first), "no more points")
    node.stop()
    again = logged(tracker)
    assert again == list(range(len(again)))
    assert caplog.messages == []
    tracker.finish(Finish("finished"))
    tracker.close()


@pytest.mark.slow
def test_no_database_is_made_where_there_is_none(folder: Path) -> None:
    (folder / "mlflow.db").unlink()
    node = process(folder / "run")
    node.start()
    started = started_node()
    until(lambda: started.cpu_times().user > 1.0, "it has not begun")
    node.stop()
    assert not started.is_running()
    assert not (folder / "mlflow.db").exists()


@pytest.mark.slow
def test_it_warns_at_the_end_where_nothing_arrived(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    node = process(folder / "run", tracking_uri="http://user:hunter22@127.0.0.1:9")
    node.start()
    log = folder / "run" / "tracking" / "mlflow.node_1.log"
    until(lambda: "tried again every 0.5 s" in log.read_text(), "it says nothing")
    node.stop()
    (message,) = caplog.messages
    assert message == "mlflow: system metrics of this machine are missing, see run/tracking/mlflow.node_1.log"
    assert "hunter22" not in log.read_text()
    assert log.read_text().count("tried again") == 1


def test_it_ends_when_its_parent_is_killed(folder: Path) -> None:
    lines = [
        "import sys, time, pathlib",
        "from hydraloop.tracking.mlflow.nodes import NodeProcess",
        f"run = pathlib.Path({str(folder / 'run')!r})",
        "NodeProcess('mlflow', run, 'digits', {'system_metrics_interval': 1.0, 'tracking_uri': None}, 1).start()",
        "print('started', flush=True)",
        "time.sleep(600)",
    ]
    command = [sys.executable, "-c", "\n".join(lines)]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "started\n"
        started = started_node(psutil.Process(parent.pid))
        parent.send_signal(signal.SIGKILL)
    until(lambda: not command_line(started), "it is left")


@pytest.mark.parametrize(
    ("local", "uri", "warns"), [(1, None, True), (2, None, False), (1, "http://127.0.0.1:5000", False)]
)
def test_a_file_is_warned_of_where_there_are_other_machines(
    folder: Path, caplog: pytest.LogCaptureFixture, local: int, uri: str | None, warns: bool
) -> None:
    ranks = Distributed()
    ranks.world_size, ranks.local_world_size = 2, local
    with caplog.at_level(logging.WARNING):
        warn_of_file("mlflow", {"tracking_uri": uri, "folder": str(folder)}, ranks)
    assert ["mlflow.db only if all machines share" in message for message in caplog.messages] == [True] * warns


# Two nodes. ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_nodes_log_to_one_run(tmp_path: Path) -> None:
    project = Project.make(tmp_path / "project")
    project.write("my_project/until.py", UNTIL)
    (tmp_path / "server").mkdir()
    with mlflow_server(tmp_path / "server") as server:
        agents = [_agent(project, number, port, server.uri) for port in [free_port()] for number in (0, 1)]
        try:
            service = MlflowClient(tracking_uri=server.uri)
            until(lambda: _points(service, CPU), "no points of node 1")
            until(lambda: _points(service, CPU.replace("node_1/", "")), "no points of rank 0's own node")
            assert [len(nodes(psutil.Process(agent.pid))) for agent in agents] == [0, 1]
            (node,) = nodes(psutil.Process(agents[1].pid))
            (project.path / "enough").touch()
            outputs = [agent.communicate(timeout=200)[0].decode() for agent in agents]
        finally:
            left = processes(project)
            for one in left:
                one.kill()
        assert [agent.returncode for agent in agents] == [0, 0], outputs
        assert left == []
        assert not node.is_running()
        (run,) = _runs(service)
        assert (run.info.status, run.data.tags["status"]) == ("FINISHED", "stopped")
        keys = {key.split("/")[1] for key in run.data.metrics if key.startswith("system/")}
        assert {"node_1", "cpu_utilization_percentage"} <= keys
        assert "node_0" not in keys, "rank 0's own have no number"
        steps = [point.step for point in _points(service, CPU)]
        assert steps == list(range(len(steps)))
    (project_run,) = project.runs
    assert "WARNING" not in project_run.log
    assert "WARNING" not in (project_run.path / "rank1.log").read_text()


def _agent(project: Project, number: int, port: int, uri: str) -> subprocess.Popen[bytes]:
    line = ["--nnodes=2", f"--node-rank={number}", "--nproc-per-node=1"]
    line += ["--master-addr=127.0.0.1", f"--master-port={port}", "train.py", "experiment=spirals"]
    line += ["engine.max_epochs=1000000", "engine.test=false", "+hooks.until._target_=my_project.until.Until"]
    line += ["hooks=mlflow", f"hooks.mlflow.tracking_uri={uri}"]
    line += ["hooks.mlflow.system_metrics_nodes=true", "hooks.mlflow.system_metrics_interval=1"]
    line += ["hooks.mlflow.flush_timeout=60"]
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *line],
        cwd=project.path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def _runs(service: MlflowClient) -> list[Any]:
    experiments = [found.experiment_id for found in service.search_experiments()]
    return list(service.search_runs(experiments))


def _points(service: MlflowClient, key: str) -> list[Any]:
    return [point for run in _runs(service) for point in service.get_metric_history(run.info.run_id, key)]
