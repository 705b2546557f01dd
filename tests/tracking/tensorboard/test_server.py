"""A real TensorBoard on loopback, with each of its two loaders, and the requests of its pages."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hydraloop.run.record_log import Record
from hydraloop.tracking.tensorboard.tracker import TensorBoardTracker
from hydraloop.tracking.tracker import Attempt, Finish, Run, Sweep

pytestmark = pytest.mark.slow

BEGAN = 1_700_000_000.0
STATUSES = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]


def job(sweep: Path, number: int, lr: float, *, attempts: int = 1) -> Run:
    params: dict[str, Any] = {"optimizer.lr": lr, "seed": 0, "task.metrics.accuracy._target_": "x"}
    made = tuple(Attempt(n, 6 * n, params, "", {}, BEGAN + n, 100 + n) for n in range(attempts))
    return Run(sweep / str(number), "uid", "", "", made, Sweep(sweep, "uid", "name", number, ("optimizer.lr",)))


def records(first: int, last: int, *, index: int) -> list[Record]:
    """Training records of each iteration, and one of a validation at the end."""
    numbers = range(first, last + 1)
    made = [Record(index + n - first, "train", 1, n, BEGAN + n, {"loss": 1 / n}, {}) for n in numbers]
    values = {"accuracy": last / 100, "loss": 0.5}
    return [*made, Record(index + len(made), "val", 1, last, BEGAN + last, values, {})]


def write(
    run: Run, memory: dict[str, Any], sent: list[Record], status: Any, *, cut: list[Record] | None = None
) -> None:
    run.run_dir.mkdir(parents=True, exist_ok=True)
    tracker = TensorBoardTracker({}, run, memory)
    if cut:
        tracker.rewound(cut[0].index, run.attempt.iteration, cut)
    tracker.open()
    tracker.send(sent)
    tracker.finish(Finish(status, None, 0 if status == "finished" else 1))


@contextmanager
def server(folder: Path, *, fast: str) -> Iterator[str]:
    """The address of a TensorBoard that shows a folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(folder), "--host", "127.0.0.1"]
    with (folder.parent / "server.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), f"--load_fast={fast}", "--reload_interval", "1"], stdout=log, stderr=log
        )
    try:
        yield f"http://127.0.0.1:{port}/data/plugin"
    finally:
        process.terminate()
        process.wait()


def asked(address: str, *, seconds: float = 60, body: Any = None) -> Any:
    """The first answer that is not empty."""
    request = urllib.request.Request(address, None if body is None else json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    until = time.monotonic() + seconds
    while True:
        try:
            with urllib.request.urlopen(request, timeout=10) as answer:
                found = json.loads(answer.read())
            if found and found.get("sessionGroups", True) if isinstance(found, dict) else found:
                return found
        except (urllib.error.URLError, ConnectionError):
            pass
        assert time.monotonic() < until, "no answer in time"
        time.sleep(0.3)


@pytest.mark.parametrize("fast", ["auto", "false"])
def test_a_sweep_in_a_real_tensorboard(tmp_path: Path, fast: str) -> None:
    sweep = tmp_path / "sweep"
    write(job(sweep, 0, 0.1), {}, records(1, 8, index=0), "finished")
    memory: dict[str, Any] = {}
    first = [*records(1, 10, index=0), Record(11, "test", 1, 10, BEGAN, {"accuracy": 0.0, "loss": 9.0}, {})]
    write(job(sweep, 1, 0.2), memory, first, "failed")
    write(job(sweep, 1, 0.2, attempts=2), memory, records(7, 12, index=6), "finished", cut=first[6:])

    with server(sweep, fast=fast) as address:
        tags: dict[str, Any] = {}
        while len(tags) < 2:
            tags = asked(f"{address}/scalars/tags")
        assert sorted(tags) == ["0/tensorboard", "1/tensorboard"]
        assert set(tags["0/tensorboard"]) == {"train/loss", "val/accuracy", "val/loss"}

        def steps(tag: str) -> list[int]:
            query = urllib.parse.urlencode({"run": "1/tensorboard", "tag": tag})
            return [step for _, step, _ in asked(f"{address}/scalars/scalars?{query}")]

        assert steps("train/loss") == list(range(1, 13))
        assert steps("val/accuracy") == [12]
        assert "test/loss" not in tags["1/tensorboard"], "of the first attempt, cut"

        columns = asked(f"{address}/hparams/experiment", body={})
        assert {info["name"] for info in columns["hparamInfos"]} == {"optimizer.lr", "seed"}
        assert columns["metricInfos"][0]["name"]["tag"] == "val/accuracy"
        wanted = {"allowedStatuses": STATUSES, "colParams": [], "startIndex": 0, "sliceSize": 10}
        groups = asked(f"{address}/hparams/session_groups", body=wanted)["sessionGroups"]
        by_name = {group["name"]: group for group in groups}
        assert {name: group["hparams"]["optimizer.lr"] for name, group in by_name.items()} == {
            "0/tensorboard": 0.1,
            "1/tensorboard": 0.2,
        }
        assert [group["sessions"][0]["status"] for group in groups] == ["STATUS_SUCCESS"] * 2
        finals = {
            value["name"]["tag"]: (value["trainingStep"], round(value["value"], 6))
            for value in by_name["1/tensorboard"]["metricValues"]
        }
        assert finals["val/accuracy"] == (12, 0.12)
