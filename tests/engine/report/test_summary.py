"""What is printed before and after a run: every line of it, from real runs."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.inputs import Loaders, Settings
from hydraloop.engine.report.summary import clock, duration, format_start, format_summary, number, shown
from hydraloop.engine.report.timing import Timing
from hydraloop.hooks.logger import LoggerHook
from hydraloop.hooks.runtime_info import RuntimeInfoHook
from hydraloop.run.result import Best
from hydraloop.tasks.task import Task
from tests.helpers import at, batches, make_engine


class Slow(Hook):
    """Says what the timer would say, and takes longer than the others."""

    priority = 30

    def before_run(self, engine: Engine) -> None:
        timing = Timing(
            iterations=6, total=0.03, mean=0.005, p50=0.004, p90=0.0085, max=0.01, data_share=0.25, hook_share=0.125
        )
        engine.messages.provide("timing", lambda: timing)

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        engine.stages.seconds["slow"][0] += 1.0


class Failing(Hook):
    """Writes a checkpoint, then fails."""

    def after_train_epoch(self, engine: Engine) -> None:
        engine.save_checkpoint(engine.run_dir / "checkpoints" / "epoch_1.pth")
        raise RuntimeError("on purpose")


def _engine(run_dir: Path, **hooks: Hook) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 300), nn.Linear(300, 1))
    model[0].requires_grad_(False)
    data = TensorDataset(torch.randn(12, 1000), torch.randn(12, 1))
    batches = [(torch.randn(4, 1000), torch.randn(4, 1))] * 2
    return Engine(
        task=Task(model, nn.MSELoss()),
        optimizer=torch.optim.SGD(model[1].parameters(), lr=0.01),
        loaders=Loaders(DataLoader(data, batch_size=4), batches, batches[:1]),
        hooks=hooks,
        settings=Settings(max_epochs=2, device="cpu"),
        run_dir=run_dir,
    )


def _rows(text: str) -> dict[str, str]:
    """{label: value} of the aligned lines; what is indented belongs to the hook order."""
    lines = [line for line in text.splitlines() if not line.startswith(" ")]
    width = lines[0].index(lines[0].split("  ")[-1].strip())
    assert all(line[width - 2 : width] == "  " and line[width] != " " for line in lines), text
    return {line[:width].strip(): line[width:] for line in lines}


def test_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = format_start(_engine(tmp_path / "runs" / "one", slow=Slow(), failing=Failing()))
    rows = _rows(text)
    assert rows["model"] == "Sequential, 300,601 parameters (301 trainable), 1.1 MiB"
    assert rows["data"] == "train 12 samples, val 2 batches, test 1 batch"
    assert rows["device"] == "cpu, fp32"
    assert rows["horizon"] == "6 iterations in 2 epochs, 3 per epoch"
    assert rows["run"] == os.path.join("runs", "one")
    order = [line.split() for line in text.splitlines() if line.startswith("  ")]
    assert order == [
        ["before_run", "slow", "(30)"],
        ["after_train_iter", "slow", "(30)"],
        ["after_train_epoch", "failing", "(50)"],
    ]


def test_the_horizon_in_iterations_may_end_within_an_epoch(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, train=batches(3), max_iters=4, accumulate=2)
    assert _rows(format_start(engine))["horizon"] == "4 iterations in 2 epochs, 3 per epoch, 2 per optimizer step"


def test_start_of_an_evaluation(tmp_path: Path) -> None:
    engine = _engine(tmp_path)
    engine.loaders = Loaders(test=engine.loaders.test)
    rows = _rows(format_start(engine))
    assert "horizon" not in rows
    assert rows["data"] == "test 1 batch"
    assert "hooks" not in rows


def test_summary_of_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = _engine(tmp_path / "run", slow=Slow(), logger=LoggerHook())
    (tmp_path / "run" / "tf_tracing_logs").mkdir(parents=True)
    engine.train()
    engine.best = Best("loss", 0.03, 3, str(tmp_path / "run" / "checkpoints" / "best_loss_epoch_1.pth"))
    rows = _rows(format_summary(engine))
    assert rows["status"] == "finished"
    assert re.fullmatch(r"6 of 6 iterations in [\d.]+m?s", rows["trained"])
    assert rows["best"] == "loss 0.0300 at iteration 3, " + os.path.join("run", "checkpoints", "best_loss_epoch_1.pth")
    assert rows["validation"] == f"loss {engine.metrics['loss']:.4f}"
    assert rows["test"] == f"loss {engine.test_metrics['loss']:.4f}"
    assert rows["iteration"] == (
        "mean 5.0ms, p50 4.0ms, p90 8.5ms, max 10.0ms; 25% of the time waiting for data, 12% in hooks"
    )
    assert re.fullmatch(r"6\.\d\ds in all, .* of the run: slow 6\.0\ds \((100|9\d)%\), logger .*", rows["hooks"])
    assert rows["records"] == os.path.join("run", "metrics.jsonl")
    assert rows["profile"] == "tensorboard --logdir " + os.path.join("run", "tf_tracing_logs")
    assert "to go on" not in rows


def test_summary_of_a_resumed_run_tells_what_this_process_did(tmp_path: Path) -> None:
    save = at("after_train_iter", lambda engine: engine.save_checkpoint(tmp_path / "checkpoints" / "iter_4.pth"), nth=4)
    hooks = {"runtime_info": RuntimeInfoHook(), "save": save}
    options = {"train": batches(3), "val": batches(1), "max_epochs": 3}
    make_engine(tmp_path, hooks, **options).train()
    engine = make_engine(tmp_path, hooks, resume=tmp_path / "checkpoints" / "iter_4.pth", **options)
    engine.train()
    rows = _rows(format_summary(engine))
    assert re.fullmatch(r"5 of 9 iterations in [\d.]+m?s \(resumed at 4\)", rows["trained"])
    assert re.fullmatch(r"loss [\d.]+ at iteration [69] \(of the validations since iteration 4\)", rows["best"])


def test_summary_of_a_failed_run_says_how_to_go_on(tmp_path: Path) -> None:
    engine = _engine(tmp_path, failing=Failing())
    with pytest.raises(RuntimeError):
        engine.train()
    rows = _rows(format_summary(engine))
    assert rows["status"] == "failed: RuntimeError: on purpose"
    assert re.fullmatch(r"3 of 6 iterations in [\d.]+m?s", rows["trained"])
    assert rows["to go on"].endswith(f" resume={shown(tmp_path)}")
    assert not {"best", "validation", "test", "iteration", "records", "profile"} & set(rows)


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(tmp_path: Path) -> None:
    class Stopping(Hook):
        def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
            engine.request_stop("enough")

    engine = _engine(tmp_path, stopping=Stopping())
    engine.train()
    rows = _rows(format_summary(engine))
    assert rows["status"] == "stopped: enough"
    assert "to go on" not in rows


def test_many_hooks_are_summed_up(tmp_path: Path) -> None:
    hooks: dict[str, Hook] = {f"hook_{index}": Hook() for index in range(9)}
    engine = _engine(tmp_path, **hooks)
    for index in range(9):
        engine.stages.seconds[f"hook_{index}"][0] = 2.0**index
    line = _rows(format_summary(engine))["hooks"]
    assert line.startswith("0:08:31 in all: hook_8 0:04:16 (50%), hook_7 ")
    assert line.endswith("3 others 7.00s")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.12345, "0.1235"),
        (0.0, "0.0000"),
        (-12.5, "-12.5000"),
        (1.2345e-5, "1.234e-05"),
        (3e7, "3.000e+07"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (7, "7"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_durations() -> None:
    assert [duration(seconds) for seconds in (8.5e-5, 0.0042, 1.234, 250)] == ["85µs", "4.2ms", "1.23s", "0:04:10"]
    assert clock(3.7) == "0:00:04"


def test_paths_outside_the_working_directory_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert shown(Path("there")) == "there"
    assert shown(tmp_path / "elsewhere") == str(tmp_path / "elsewhere")
