"""A real TensorBoard on loopback, with each of its two loaders, and the requests of its pages."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hydraloop.files.metrics_log import LoggedObject, Record
from hydraloop.tracking.tensorboard import TensorBoardTracker
from hydraloop.tracking.tracker import Attempt, Finish, LostError, Run, Sweep
from tests.helpers import make_engine
from tests.marks import nightly, slow

BEGAN = 1_700_000_000.0
STATUSES = ["STATUS_UNKNOWN", "STATUS_SUCCESS", "STATUS_FAILURE", "STATUS_RUNNING"]


def job(sweep: Path, number: int, lr: float, *, attempts: int = 1) -> Run:
    params: dict[str, Any] = {"optimizer.lr": lr, "seed": 0, "task.metrics.accuracy._target_": "x"}
    made = tuple(Attempt(n, 6 * n, params, "", {}, BEGAN + n, 100 + n) for n in range(attempts))
    return Run(sweep / str(number), "uid", "", f"lr={lr}", made, Sweep(sweep, "uid", "name", number, ("optimizer.lr",)))


def records(first: int, last: int, *, index: int) -> list[Record]:
    """Training records of each iteration, and one of a validation at the end."""
    numbers = range(first, last + 1)
    made = [Record(index + n - first, "train", 1, n, BEGAN + n, {"loss": 1 / n}, {}) for n in numbers]
    values = {"accuracy": last / 100, "loss": 0.5}
    return [*made, Record(index + len(made), "val", 1, last, BEGAN + last, values, {})]


def write(run: Run, log: list[Record], status: Any, *, first: int = 0) -> None:
    """Send a log from a line on, as the follower of a new sender does."""
    run.run_dir.mkdir(parents=True, exist_ok=True)
    tracker = TensorBoardTracker({}, run, {})
    tracker.open()
    try:
        tracker.send(log[first:])
    except LostError as lost:
        tracker.send(log[lost.index :])
    tracker.finish(Finish(status, None))


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


def points(address: str, run: str, tag: str) -> list[tuple[int, float]]:
    query = urllib.parse.urlencode({"run": run, "tag": tag})
    return [(step, round(value, 6)) for _, step, value in asked(f"{address}/scalars/scalars?{query}")]


FIRST, SECOND = "0/tensorboard/lr=0.1", "1/tensorboard/lr=0.2"


@pytest.mark.parametrize("fast", [slow("true"), nightly("false")])
def test_a_sweep_in_a_real_tensorboard(tmp_path: Path, fast: str) -> None:
    sweep = tmp_path / "sweep"
    write(job(sweep, 0, 0.1), records(1, 8, index=0), "finished")
    log = [*records(1, 10, index=0), Record(11, "test", 1, 10, BEGAN, {"accuracy": 0.0, "loss": 9.0}, {})]
    write(job(sweep, 1, 0.2), log, "failed")
    resumed = [*log[:6], *records(7, 12, index=6)]
    write(job(sweep, 1, 0.2, attempts=2), resumed, "finished", first=6)

    with server(sweep, fast=fast) as address:
        tags: dict[str, Any] = {}
        while len(tags) < 2:
            tags = asked(f"{address}/scalars/tags")
        assert sorted(tags) == [FIRST, SECOND]
        assert set(tags[FIRST]) == {"train/loss", "val/accuracy", "val/loss"}
        assert [step for step, _ in points(address, SECOND, "train/loss")] == list(range(1, 13))
        assert points(address, SECOND, "val/accuracy") == [(12, 0.12)]
        assert "test/loss" not in tags[SECOND], "of the first attempt, cut"

        columns = asked(f"{address}/hparams/experiment", body={})
        assert {info["name"] for info in columns["hparamInfos"]} == {"optimizer.lr", "seed"}
        assert columns["metricInfos"][0]["name"]["tag"] == "val/accuracy"
        wanted = {"allowedStatuses": STATUSES, "colParams": [], "startIndex": 0, "sliceSize": 10}
        groups = asked(f"{address}/hparams/session_groups", body=wanted)["sessionGroups"]
        by_name = {group["name"]: group for group in groups}
        rates = {name: group["hparams"]["optimizer.lr"] for name, group in by_name.items()}
        assert rates == {FIRST: 0.1, SECOND: 0.2}
        assert [group["sessions"][0]["status"] for group in groups] == ["STATUS_SUCCESS"] * 2
        finals = {
            value["name"]["tag"]: (value["trainingStep"], round(value["value"], 6))
            for value in by_name[SECOND]["metricValues"]
        }
        assert finals["val/accuracy"] == (12, 0.12)


@pytest.mark.parametrize("fast", [slow("true"), nightly("false")])
def test_a_tensorboard_that_is_open_while_a_run_is_resumed(tmp_path: Path, fast: str) -> None:
    sweep = tmp_path / "sweep"
    log = records(1, 10, index=0)
    write(job(sweep, 1, 0.2), log, "failed")
    with server(sweep, fast=fast) as address:
        assert len(points(address, SECOND, "train/loss")) == 10
        later = [replace(one, values={"loss": 5.0}) for one in records(7, 8, index=6)[:2]]
        write(job(sweep, 1, 0.2, attempts=2), [*log[:6], *later], "finished", first=6)
        expected = [(n, round(1 / n, 6)) for n in range(1, 7)] + [(7, 5.0), (8, 5.0)]
        until = time.monotonic() + 60
        while points(address, SECOND, "train/loss") != expected:
            assert time.monotonic() < until, points(address, SECOND, "train/loss")
            time.sleep(0.3)


@pytest.mark.parametrize("fast", [slow("true"), nightly("false")])
def test_objects_and_the_config_in_a_real_tensorboard(tmp_path: Path, fast: str) -> None:
    engine = make_engine(tmp_path / "0")
    for log, *given in (
        (engine.log_image, "val/predictions", torch.rand(6, 7)),
        (engine.records.log_text, "note", "**bold**"),
        (engine.records.log_table, "pairs", ["a|b", "c"], [[1, "x"], [None, 2.5]]),
        (engine.records.log_histogram, "logits", [1.0, 2.0, float("nan")]),
    ):
        log(*given)  # type: ignore[operator]
    kinds = [("image", "val/predictions", "val/predictions_iter_0.png"), ("text", "train/note", "train/note_iter_0.md"),
             ("table", "train/pairs", "train/pairs_iter_0.json"),
             ("histogram", "train/logits", "train/logits_iter_0.json")]  # fmt: skip
    objects = tuple(LoggedObject(kind, name, f"media/{path}") for kind, name, path in kinds)  # type: ignore[arg-type]
    run = job(tmp_path, 0, 0.1)
    run = replace(run, attempts=(replace(run.attempt, config="optimizer:\n  lr: 0.1\n"),))
    write(run, [Record(0, "val", 1, 3, BEGAN, {"loss": 1.0}, {}, objects)], "finished")
    with server(tmp_path, fast=fast) as address:
        assert [step for step, _ in points(address, FIRST, "nonfinite/train/logits")] == [3]
        tags = asked(f"{address}/text/tags")[FIRST]
        assert set(tags) == {"config", "train/note", "train/pairs"}

        def text(tag: str) -> str:
            query = urllib.parse.urlencode({"run": FIRST, "tag": tag})
            (found,) = asked(f"{address}/text/text?{query}")
            shown: str = found["text"]
            return shown

        assert "<strong>bold</strong>" in text("train/note")
        assert re.findall(r"<t[hd](?: [^>]*)?>([^<]*)<", text("train/pairs")) == ["a|b", "c", "1", "x", "", "2.5"]
        assert re.search(r"<code[^>]*>optimizer:\n  lr: 0.1", text("config"))
        assert set(asked(f"{address}/images/tags")[FIRST]) == {"val/predictions"}
        assert set(asked(f"{address}/histograms/tags")[FIRST]) == {"train/logits"}
