"""CPU time of the MLflow follower, compared with a bare script that sends the same points with `MlflowClient`.

    python scripts/benchmarks/tracking_cost.py [--rounds 5]

Both import MLflow, open an SQLite database, send 40 batches of 200 records, and close the run. They take turns. The
follower also sends parameters, tags, the config and the machine's load. Goal: at most 1.2 times the CPU time.
"""

from __future__ import annotations

import argparse
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from hydraloop.run.record_log import FILENAME
from hydraloop.run.record_writer import RecordLog
from hydraloop.run.result import FILENAME as RESULT_FILE
from hydraloop.tracking import description
from hydraloop.tracking.cursor import Cursor
from hydraloop.tracking.link import Link
from hydraloop.tracking.tracker import MLFLOW, Attempt, Finish, Run

GOAL = 1.2
BATCHES, RECORDS = 40, 200
VALUES = {"loss": 0.25, "lr": 0.001}
OPEN = "import sys; from mlflow import MlflowClient; MlflowClient(tracking_uri=sys.argv[1])"
BARE = f"""
import sys, time
from mlflow import MlflowClient
from mlflow.entities import Metric
client = MlflowClient(tracking_uri=sys.argv[1])
run = client.create_run(client.create_experiment("bare")).info.run_id
for batch in range({BATCHES}):
    steps = range(batch * {RECORDS}, (batch + 1) * {RECORDS})
    now = round(time.time() * 1000)
    points = [Metric("train/" + name, value, now, step) for step in steps for name, value in {VALUES}.items()]
    client.log_batch(run, points)
client.set_terminated(run)
"""


def main() -> None:
    """Run the benchmark and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {"bare script": [], "follower": []}
    with tempfile.TemporaryDirectory(prefix="hydraloop-cost-") as name:
        folder = Path(name)
        empty = folder / "empty.db"
        _bare(empty, OPEN)
        for number in range(rounds):
            for who in sorted(times, reverse=bool(number % 2)):
                place = folder / f"{who} {number}"
                place.mkdir()
                shutil.copy(empty, place / "mlflow.db")
                times[who].append(_bare(place / "mlflow.db") if who == "bare script" else _follower(place))
    for who, seconds in times.items():
        print(f"{who:<12} {statistics.median(seconds):5.2f} CPU s  ({min(seconds):.2f} to {max(seconds):.2f})")
    ratios = [one / other for one, other in zip(times["follower"], times["bare script"], strict=True)]
    print(f"ratio        {statistics.median(ratios):5.2f}        ({min(ratios):.2f} to {max(ratios):.2f}), goal {GOAL}")


def _bare(database: Path, code: str = BARE) -> float:
    before = _children()
    subprocess.run([sys.executable, "-c", code, f"sqlite:///{database}"], check=True, capture_output=True)
    return _children() - before


def _follower(place: Path) -> float:
    """Let a real follower send a run that has ended. Returns its CPU time."""
    run_dir = place / "run"
    run_dir.mkdir()
    params: dict[str, str | int | float | bool | None] = {f"optimizer.option_{number}": number for number in range(80)}
    attempt = Attempt(0, 0, params, "a: 1\n", {"command": "python train.py"}, time.time(), 1)
    description.write(Run(run_dir, "0123456789abcdef", "digits", "run", (attempt,)))
    log = RecordLog(run_dir / FILENAME)
    for step in range(BATCHES * RECORDS):
        log.append({"mode": "train", "epoch": 1, "iteration": step, **VALUES})
    log.close()
    (run_dir / RESULT_FILE).write_text('{"status": "finished", "best": null}')
    before = _children()
    link = Link(run_dir, "mlflow", MLFLOW, {"folder": str(place), "tags": {}, "flush_timeout": 120.0})
    link.start()
    link.begin()
    link.finish(Finish("finished"))
    link.wait()
    cursor = Cursor.load(run_dir, "mlflow")
    if cursor is None or cursor.index != BATCHES * RECORDS or not cursor.finished:
        raise RuntimeError((run_dir / "tracking" / "mlflow.log").read_text(encoding="utf-8")[-4000:])
    return _children() - before


def _children() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
