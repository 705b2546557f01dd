"""results.csv, results.json and the tables of a sweep, whose states are written by hand."""

from __future__ import annotations

import csv
import json
import math
import resource
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hydraloop.config import arguments
from hydraloop.files.config_yaml import plain
from hydraloop.files.secrets import remember_overrides
from hydraloop.sweeps import results, results_table
from hydraloop.sweeps.sweep_directory import SweepDirectory
from tests.sweeps.written import finished, sweep, write


@pytest.fixture
def directory(tmp_path: Path) -> SweepDirectory:
    """Two lrs, two seeds and a constant: job 2 is the luckiest; job 1 has failed, job 3 diverged."""
    made = sweep(tmp_path / "sweep", "optimizer.lr=1e-3,1e-2", "seed=0,1", "engine.max_epochs=3")
    told = {
        0: finished(0.9),
        1: finished(0.99, state="failed", error="ValueError: [red] is bad :smile:\nmore", checkpoint=None),
        2: finished(0.95, state="stopped", reason="no improvement"),
        3: finished(math.nan, checkpoint=None),
    }
    write(made, told)
    return made


def as_json(directory: SweepDirectory) -> dict[str, Any]:
    content: dict[str, Any] = plain(results.for_programs(directory, results.collect(directory)))
    return content


def test_the_files_have_a_row_for_each_job_with_the_best_first(directory: SweepDirectory) -> None:
    results.write(directory, results.collect(directory))
    rows = list(csv.reader((directory.path / "results.csv").read_text().splitlines()))
    header = ["job", "optimizer.lr", "seed", "status", "metric", "value", "step", "checkpoint", "seconds"]
    best = ["2", "1e-2", "0", "stopped", "accuracy", "0.95", "40", "2/checkpoints/best.pth", "2.0"]
    assert rows[:2] == [[*header, "error", "reason"], [*best, "", "no improvement"]]
    assert [row[0] for row in rows[1:]] == ["2", "0", "1", "3"]
    assert rows[3][:3] == ["1", "1e-3", "1"]
    assert rows[4][5] == "nan"
    content = json.loads((directory.path / "results.json").read_text())
    assert content["rows"][3] == {
        "job": 3,
        "swept": {"optimizer.lr": "1e-2", "seed": "1"},
        "status": "finished",
        "metric": "accuracy",
        "value": "nan",
        "step": 40,
        "checkpoint": None,
        "seconds": 2.0,
        "error": None,
        "reason": None,
        "objectives": {},
    }
    assert content["rows"][2]["error"].startswith("ValueError: [red] is bad")
    best = {"swept": {"optimizer.lr": "1e-3"}, "jobs": [0, 1], "values": [0.9], "mean": 0.9, "deviation": None}
    assert content["best"] == {**best, "command": "python train.py -m optimizer.lr=1e-3 seed=0,1 engine.max_epochs=3"}


def test_the_table_shows_all_that_the_files_have(directory: SweepDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    results_table.show(directory)
    printed = capsys.readouterr().out.splitlines()
    cells = [line.split() for line in printed]
    assert cells[1] == ["job", "lr", "seed", "status", "accuracy", "step", "time", "checkpoint", "reason"]
    assert cells[2][:-2] == ["2", "1e-2", "0", "stopped", "0.9500", "40", "2.00s", "2/checkpoints/best.pth"]
    assert cells[2][-2:] == ["no", "improvement"]
    assert printed[4].endswith("ValueError: [red] is bad :smile:")
    assert cells[5][:5] == ["3", "1e-2", "1", "finished", "nan"]
    assert [line.split() for line in printed[7:10]] == [
        ["lr", "jobs", "mean", "accuracy", "sd"],
        ["1e-3", "1", "of", "2", "0.9000"],
        ["1e-2", "2", "nan", "nan"],
    ]
    assert printed[-2:] == [
        "best: optimizer.lr=1e-3, mean accuracy 0.9000 over 1 of 2 jobs; it runs again with",
        "  python train.py -m optimizer.lr=1e-3 seed=0,1 engine.max_epochs=3",
    ]


def test_low_values_of_a_loss_are_the_best(tmp_path: Path) -> None:
    made = sweep(tmp_path / "sweep", "a=0,1,2")
    write(made, {n: finished(value, metric="loss", rule="less") for n, value in enumerate((0.2, -0.3, math.inf))})
    assert [row["job"] for row in as_json(made)["rows"]] == [1, 0, 2]


@pytest.mark.parametrize(
    "told",
    [
        {},
        {0: {"state": "running"}, 1: {"state": "failed", "error": "x"}},
        {0: finished(None, metric=None, rule=None)},
        {0: finished(0.5, rule=None), 1: finished(0.4, rule=None)},
        {0: finished(math.nan)},
    ],
)
def test_without_a_comparable_result_no_job_is_the_best(
    tmp_path: Path, told: dict[int, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    made = sweep(tmp_path / "sweep", "a=0,1", "seed=0,1")
    write(made, told)
    results_table.show(made)
    assert "best" not in capsys.readouterr().out.replace("best.pth", "")
    content = as_json(made)
    assert content["best"] is None
    assert [row["job"] for row in content["rows"]] == [0, 1, 2, 3]


def test_jobs_with_another_metric_are_not_compared(tmp_path: Path) -> None:
    made = sweep(tmp_path / "sweep", "task=a,b", "seed=0,1")
    write(made, {0: finished(0.5), 1: finished(0.6), 2: finished(90.0, metric="top5"), 3: finished(0.7)})
    content = as_json(made)
    assert [row["job"] for row in content["rows"]] == [3, 1, 0, 2]
    assert [group["values"] for group in content["groups"]] == [[0.7], [0.5, 0.6]]


def test_a_job_that_diverges_before_its_first_validation_does_not_name_the_metric(tmp_path: Path) -> None:
    made = sweep(tmp_path / "sweep", "a=0,1")
    write(made, {0: finished(math.nan, state="failed", metric="loss", error="the loss is nan"), 1: finished(0.6)})
    content = as_json(made)
    assert (content["metric"], content["best"]["job"]) == ("accuracy", 1)


@pytest.mark.parametrize(("key", "option"), [("seed", ""), ("my.fold", " sweep.average=my.fold")])
def test_over_seeds_or_folds_the_best_average_is_the_best_and_not_the_luckiest_job(
    key: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    made = sweep(tmp_path / "sweep", f"{key}=0,1,2", "a=0,1,2", average=key)
    values = {0: (0.5, 0.99, 0.6), 1: (0.8, 0.9, 0.85), 2: (0.91, None, None)}  # by a
    write(made, {3 * s + a: finished(found[s]) for a, found in values.items() for s in range(3)})
    write(made, {5: {"state": "failed", "error": "x"}, 8: {"state": "queued"}})
    content = as_json(made)
    assert content["rows"][0]["job"] == 3, "the luckiest job"
    assert content["groups"][0]["swept"] == {"a": "2"}, "the average of a single job"
    command = f"python train.py -m {key}=0,1,2 a=1{option}"
    assert (content["best"]["swept"], content["best"]["command"]) == ({"a": "1"}, command)
    assert (content["best"]["mean"], content["best"]["deviation"]) == pytest.approx((0.85, 0.05))
    results_table.show(made)
    printed = capsys.readouterr().out.splitlines()
    assert printed[-2:] == ["best: a=1, mean accuracy 0.8500 over 3 of 3 jobs; it runs again with", f"  {command}"]


def test_a_job_that_has_failed_with_nan_is_not_left_out_of_its_average(tmp_path: Path) -> None:
    made = sweep(tmp_path / "sweep", "a=0,1", "seed=0,1")
    diverged = finished(math.nan, state="failed", error="engine.allow_nan: the loss is nan", checkpoint=None)
    write(made, {0: finished(0.9), 1: diverged, 2: finished(0.5), 3: finished(0.6)})
    content = as_json(made)
    assert [group["mean"] for group in content["groups"]] == [0.55, "nan"]
    assert content["best"]["swept"] == {"a": "1"}
    write(made, {2: diverged})
    assert as_json(made)["best"] is None


def test_the_command_has_custom_flags_and_no_option_of_the_sweep(tmp_path: Path) -> None:
    remember_overrides(["+logger.api_key=abcdefgh12345678"])
    hydra = ("hydra.searchpath=[file://other]", "hydra.sweep.dir=x", "hydra.verbose=true")
    axes = (
        "hooks=[],[ema]",
        "~default_hooks.logger=",
        "+logger.api_key=abcdefgh12345678",
    )
    command = ("python", "my train.py", "--multirun", "--config-name=other")
    made = sweep(
        tmp_path / "sweep", *axes, overrides=(*axes, *hydra, "detach=true", "sweep.max_workers=2"), command=command
    )
    text = results.rerun_command(made, 1)
    assert "abcdefgh" not in text
    assert shlex.split(text.replace("***", "x")) == [
        *("python", "my train.py", "--config-name=other", hydra[0], hydra[2]),
        *("hooks=[ema]", "~default_hooks.logger=", "+logger.api_key=x"),
    ]
    arguments.parse(shlex.split(text)[4:])
    module = sweep(tmp_path / "module", "a=1,2", overrides=("a=1,2",), command=("python", "-m", "hydraloop", "-m"))
    assert results.rerun_command(module, 1) == "python -m hydraloop a=2"


def test_a_full_disk_still_shows_the_table(
    directory: SweepDirectory, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with full_disk():
        results_table.show(directory)
    assert "accuracy" in capsys.readouterr().out
    assert "results.csv and results.json cannot be written: File too large" in caplog.text
    assert not list(directory.path.glob("*results*"))


@contextmanager
def full_disk() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
