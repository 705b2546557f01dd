"""What is printed before, during and after a run."""

from __future__ import annotations

import os
import re
import shlex
from pathlib import Path
from signal import SIGTERM
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.named_optimizers import OptimizerSet
from hydraloop.engine.record_table import RecordTable
from hydraloop.errors import Terminated
from hydraloop.files.environment import shown
from hydraloop.files.result import Best, Objective, Result
from hydraloop.files.terminal import clock, duration, number
from hydraloop.hooks.checkpoint import CheckpointHook
from hydraloop.hooks.logger import LoggerHook
from hydraloop.hooks.runtime_info import RuntimeInfoHook
from hydraloop.hooks.timer import Timing
from hydraloop.optim import Exponential, Schedule
from hydraloop.tasks.task import Task
from tests.helpers import EngineWithNeededHooks, at, batches, failing, make_engine, summary


class Slow(Hook):
    """Provides `timing` as the timer does, and takes longer than the others."""

    priority = 30

    def before_run(self, engine: Engine) -> None:
        timing = Timing(iterations=6, total=0.03, mean=0.005, p50=0.004, p90=0.0085, max=0.01, data_share=0.25)
        engine.messages.provide("timing", lambda: timing)

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        engine.calls.seconds["slow"][0] += 1.0


class Failing(Hook):
    """Writes a checkpoint, then fails."""

    def after_train_epoch(self, engine: Engine) -> None:
        engine.checkpoints.save(engine.run_dir / "checkpoints" / "epoch_1.pth")
        raise RuntimeError("on purpose\nwith details")


def _engine(run_dir: Path, **hooks: Hook) -> Engine:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1000, 300), nn.Linear(300, 1))
    model[0].requires_grad_(False)
    data = TensorDataset(torch.randn(12, 1000), torch.randn(12, 1))
    batches = [(torch.randn(4, 1000), torch.randn(4, 1))] * 2
    return make_engine(
        run_dir,
        hooks,
        train=DataLoader(data, batch_size=4),
        val=batches,
        test=batches[:1],
        task=Task(model, nn.MSELoss()),
        optimizer=torch.optim.SGD(model[1].parameters(), lr=0.01),
        max_epochs=2,
    )


def _rows(text: str) -> dict[str, str]:
    """Return {label: first line of its value}; indented lines belong to the value before or to the hook order."""
    lines = [line for line in text.splitlines() if not line.startswith(" ")]
    width = lines[0].index(lines[0].split("  ")[-1].strip())
    assert all(line[width - 2 : width] == "  " and line[width] != " " for line in lines), text
    return {line[:width].strip(): line[width:] for line in lines}


def test_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = _engine(tmp_path / "runs" / "one", slow=Slow(), failing=Failing()).outcome.report.start()
    rows = _rows(text)
    assert rows["model"] == "Sequential, 300,601 parameters (301 trainable), 1.1 MiB"
    assert rows["data"] == "train 12 samples, val 2 batches, test 1 batch"
    assert rows["device"] == "cpu, fp32"
    assert rows["optimizer"] == "SGD, lr 0.01, weight_decay 0"
    assert "schedule" not in rows
    assert rows["training"] == "2 epochs of 3 iterations"
    assert rows["run"] == os.path.join("runs", "one")
    assert rows["hooks"] == "in the order they are called at each mount point, with priority"
    assert _by_point(text) == {
        "before_run": "slow (30)",
        "after_train_iter": "slow (30)",
        "after_train_epoch": "failing (50)",
    }


def _by_point(text: str) -> dict[str, str]:
    """Return {mount point: its hooks} of the start."""
    return dict(line.split(maxsplit=1) for line in text.splitlines() if re.match("  [a-z]", line))


def test_the_training_in_iterations_may_end_within_an_epoch(tmp_path: Path) -> None:
    engine = make_engine(tmp_path, train=batches(3), max_iters=4, accumulate=2)
    assert _rows(engine.outcome.report.start())["training"] == "4 iterations, 3 per epoch, 2 per optimizer step"


def test_each_group_of_several_optimizers_has_a_line(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 200), nn.LayerNorm(200), nn.Linear(200, 1))
    muon = torch.optim.Muon([net[0].weight], lr=0.02)
    decayed, others = [net[2].weight], [net[0].bias, *net[1].parameters(), net[2].bias]
    groups = [{"params": decayed, "lr": 1e-3 / 3}, {"params": []}, {"params": others, "weight_decay": 0.0}]
    rest = torch.optim.AdamW(groups, lr=0.002)
    optimizer = OptimizerSet({"hidden": muon, "rest": rest})
    engine = make_engine(
        tmp_path,
        task=Task(net, nn.MSELoss()),
        optimizer=optimizer,
        schedules={name: Schedule(name, Exponential(0.5), optimizer) for name in ("cosine", "own")},
    )
    assert [line[11:] for line in engine.outcome.report.start().splitlines()[3:8]] == [
        "hidden Muon, rest AdamW, 3 groups",
        "hidden: 1 tensor (0.weight), 600 parameters, lr 0.02, weight_decay 0.1",
        "rest: 1 tensor (2.weight), 200 parameters, lr 0.0003333, weight_decay 0.01",
        "rest.2: 4 tensors (0.bias, …), 601 parameters, lr 0.002, weight_decay 0",
        "cosine, own",
    ]


def test_many_groups_are_cut_short(tmp_path: Path) -> None:
    net = nn.ModuleList([nn.Linear(3, 3) for _ in range(10)])
    optimizer = torch.optim.SGD([{"params": [parameter]} for parameter in net.parameters()], lr=0.1)
    task = Task(net, nn.MSELoss())
    text = EngineWithNeededHooks(task=task, optimizer=optimizer, loaders=Loaders(batches(2))).outcome.report.start()
    assert "SGD, 20 groups\n" in text
    assert [name in text for name in ("5.bias", "6.weight", "… 8 more")] == [True, False, True]


def test_start_of_an_evaluation(tmp_path: Path) -> None:
    engine = _engine(tmp_path)
    engine.batches.use(Loaders(test=engine.loaders.test))
    rows = _rows(engine.outcome.report.start())
    assert "training" not in rows
    assert "optimizer" not in rows
    assert rows["data"] == "test 1 batch"
    assert "hooks" not in rows


def test_summary_of_a_finished_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    engine = _engine(tmp_path / "run", slow=Slow(), logger=LoggerHook())
    (tmp_path / "run" / "tf_tracing_logs").mkdir(parents=True)
    engine.train()
    checkpoints = tmp_path / "run" / "checkpoints"
    result = engine.outcome.result
    assert result is not None
    result.objective = Objective("loss", "less", 0.03, 3)
    engine.validations.best = result.best = Best("loss", 0.03, 3, str(checkpoints / "best_loss_epoch_1.pth"))
    engine.checkpoints.last_checkpoint = checkpoints / "epoch_2.pth"
    text = summary(engine, 12.0)
    rows = _rows(text)
    assert rows["status"] == "finished"
    assert re.fullmatch(r"6 of 6 iterations in [\d.]+m?s", rows["trained"])
    assert rows["best"] == "loss 0.03000 at iteration 3"
    assert rows["checkpoint"] == os.path.join("run", "checkpoints", "best_loss_epoch_1.pth") + " (the best)"
    assert os.path.join("run", "checkpoints", "epoch_2.pth") + " (the last)\n" in text
    assert rows["validation"] == f"loss {number(engine.metrics['loss'])}"
    assert rows["test"] == f"loss {number(engine.evaluator.test_metrics['loss'])} (of the best checkpoint)"
    assert rows["speed"] == "800 samples/s, 200 iterations/s"
    assert "  mean 5.0ms, p50 4.0ms, p90 8.5ms, max 10.0ms\n" in text
    engine.validations.metrics = {f"a_metric_{index}": index / 7 for index in range(9)}
    assert "0.1429, a_metric_2 0.2857,\n" in summary(engine)
    assert max(map(len, summary(engine).splitlines())) <= 80
    # 25% of the iterations' 0.03 s, and 6 s in the hook `slow`: both are shares of the same 12 s.
    assert re.fullmatch(r"12.00s: 0% waiting for data, 5\d% in hooks", rows["time"])
    assert re.fullmatch(r"slow 6\.0\ds, logger [^,]+", rows["hooks"])
    assert "trackers" not in rows
    # Waiting for trackers is a row, and no work of a hook.
    engine.messages.provide("tracker_waits", lambda: {"slow": 5.0, "mlflow": 0.0})
    waiting = _rows(summary(engine, 12.0))
    assert waiting["trackers"] == "waited 5.00s for slow, mlflow at the end"
    assert re.fullmatch(r"12.00s: 0% waiting for data, [89]% in hooks", waiting["time"])
    assert re.fullmatch(r"slow 1\.0\ds, logger [^,]+", waiting["hooks"])
    assert rows["records"] == os.path.join("run", "metrics.jsonl")
    assert rows["profile"] == "run/tf_tracing_logs; https://ui.perfetto.dev opens a trace"
    assert "continue" not in rows


def test_summary_of_a_resumed_run_tells_what_this_process_did(tmp_path: Path) -> None:
    save = at(
        "after_train_iter", lambda engine: engine.checkpoints.save(tmp_path / "checkpoints" / "iter_4.pth"), nth=4
    )
    hooks = {"runtime_info": RuntimeInfoHook(), "save": save}
    options = {"train": batches(3), "val": batches(1), "max_epochs": 3}
    make_engine(tmp_path, hooks, **options).train()
    engine = make_engine(tmp_path, hooks, resume=tmp_path / "checkpoints" / "iter_4.pth", **options)
    engine.train()
    rows = _rows(summary(engine))
    assert re.fullmatch(r"5 of 9 iterations in [\d.]+m?s, resumed at 4; all 9 took [\d.]+m?s", rows["trained"])
    result = Result.read(tmp_path)
    assert result is not None
    assert result.seconds > result.earlier_seconds > 0
    assert re.fullmatch(r"loss [\d.]+ at iteration [369] \(no best checkpoint\)", rows["best"])


@pytest.mark.parametrize(
    ("error", "status"),
    [(KeyboardInterrupt(), "interrupted by Ctrl-C (SIGINT)"), (Terminated(SIGTERM), "interrupted by SIGTERM")],
)
def test_an_interrupted_run_names_the_signal(error: KeyboardInterrupt, status: str, tmp_path: Path) -> None:
    engine = make_engine(tmp_path, {"failing": failing("after_train_iter", error)})
    with pytest.raises(KeyboardInterrupt):
        engine.train()
    assert _rows(summary(engine))["status"] == status


def test_the_command_to_continue_is_that_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = _engine(tmp_path / "a run", failing=Failing())
    with pytest.raises(RuntimeError):
        engine.train()
    for command in ([], ["resume", "elsewhere"]):
        monkeypatch.setattr("hydraloop.files.environment._command", ["python", "train.py", "--config-name=x", *command])
        words = shlex.split(_rows(summary(engine))["continue"])
        assert words == ["python", "train.py", "resume", shown(tmp_path / "a run")]


def test_summary_of_a_failed_run_has_the_command_to_continue(tmp_path: Path) -> None:
    engine = _engine(tmp_path, failing=Failing())
    with pytest.raises(RuntimeError):
        engine.train()
    rows = _rows(summary(engine))
    assert rows["status"] == "failed: RuntimeError: on purpose"
    assert re.fullmatch(r"3 of 6 iterations in [\d.]+m?s", rows["trained"])
    assert rows["continue"] == f"python train.py resume {shown(tmp_path)}", "a script may read no arguments"
    assert not {"best", "validation", "test", "speed", "records", "profile"} & set(rows)


class Stopping(Hook):
    """Stops the run in its first iteration."""

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        engine.request_stop("enough")


@pytest.mark.parametrize("hooks", [{}, {"checkpoint": CheckpointHook()}])
def test_a_run_that_a_hook_has_stopped_has_no_command_to_continue(tmp_path: Path, hooks: dict[str, Hook]) -> None:
    engine = _engine(tmp_path, stopping=Stopping(), **hooks)
    engine.train()
    rows = _rows(summary(engine))
    assert rows["status"] == "stopped: enough"
    assert "continue" not in rows


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.12345, "0.1235"),
        (0.0, "0.0"),
        (1234.5678, "1235"),
        (1.2345e-5, "1.234e-05"),
        (float("nan"), "nan"),
        (float("-inf"), "-inf"),
        (7, "7"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_durations() -> None:
    assert [duration(seconds) for seconds in (8.5e-5, 0.0042, 0.3015, 1.234, 250)] == [
        "85µs", "4.2ms", "302ms", "1.23s", "0:04:10",
    ]  # fmt: skip
    assert [clock(seconds) for seconds in (3.7, 93784)] == ["0:00:04", "26:03:04"]


def test_paths_outside_the_working_directory_are_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert shown(Path("there")) == "there"
    assert shown(tmp_path / "elsewhere") == str(tmp_path / "elsewhere")


TRAIN: dict[str, Any] = {
    "mode": "train", "epoch": 1, "iteration": 10, "lr": 0.00097, "momentum": 0.9, "eta": 93784.0, "time": 0.0475,
    "data_time": 0.000873, "samples_per_second": 1347.4, "memory": 273.4, "grad_norm": 1.25, "aux_loss": 1e-6,
    "loss": 1.98355,
}  # fmt: skip
VAL: dict[str, Any] = {"mode": "val", "epoch": 1, "iteration": 20, "accuracy": 0.84358, "loss": 1.67617}


def _lines(table: RecordTable, *records: dict[str, Any]) -> list[str]:
    """Everything that is printed, with a note at the end of validations."""
    lines = []
    for record in records:
        lines.append(table.header(record))
        lines.append(table.line(record, "best" if record["mode"] == "val" else ""))
    return [line for line in lines if line is not None]


def test_numbers_are_below_their_header() -> None:
    assert _lines(RecordTable(20, 400, ["accuracy", "loss"]), TRAIN, VAL, {**TRAIN, "iteration": 200}) == [
        "       epoch     iter       lr      eta     time     data  samples/s   memory  grad_norm      loss  aux_loss"
        "  accuracy",
        "train   1/20   10/400  9.7e-04 26:03:04   47.5ms    873µs       1347   273MiB      1.250     1.984 1.000e-06",
        "val     1/20   20/400                                                                        1.676"
        "              0.8436  best",
        "train   1/20  200/400  9.7e-04 26:03:04   47.5ms    873µs       1347   273MiB      1.250     1.984 1.000e-06",
    ]


def test_a_name_does_not_control_the_terminal() -> None:
    header, _ = _lines(RecordTable(20, 400, []), {**TRAIN, "a\x1b]0;title\x07": 1.0})
    assert "a\\x1b]0;title\\x07" in header


def test_further_lrs_are_beside_the_first_unless_there_are_many() -> None:
    lrs = {f"lr/{name}": 2e-4 for name in ("generator", "critic.1")}
    header, line = _lines(RecordTable(1, 1), {**TRAIN, **lrs})
    assert header.split()[2:6] == ["lr", "lr/generator", "lr/critic.1", "eta"]
    assert line.split()[3:6] == ["9.7e-04", "2.0e-04", "2.0e-04"]
    assert len(line) == len(header.rstrip()) or line.index("2.0e-04") == header.index("generator") + 2
    many = {f"lr/{index}": 0.1 for index in range(5)}
    assert "lr/" not in _lines(RecordTable(1, 1), {**TRAIN, **many})[0]


def test_the_header_is_repeated_every_20_lines() -> None:
    lines = _lines(RecordTable(20, 400), *[TRAIN] * 45)
    assert [index for index, line in enumerate(lines) if "epoch" in line] == [0, 21, 42]


def test_a_new_column_repeats_the_header_and_counts_again() -> None:
    lines = _lines(RecordTable(20, 400), *[TRAIN] * 3, {**TRAIN, "skipped": 2}, *[TRAIN] * 21)
    assert [index for index, line in enumerate(lines) if "epoch" in line] == [0, 4, 25]
    assert "skipped" not in lines[0]
    assert lines[4].split() == [
        "epoch", "iter", "lr", "eta", "time", "data", "samples/s", "memory", "skipped", "grad_norm", "loss", "aux_loss",
    ]  # fmt: skip
    assert lines[6].index("273MiB") < lines[6].index("1.250")
    assert len(lines[6]) == len(lines[5])


def test_a_negative_number_with_an_exponent_keeps_its_distance() -> None:
    line = _lines(RecordTable(20, 400), {**TRAIN, "loss": -1.2345e-05, "aux_loss": -2.5e9, "grad_norm": 12345678901})[1]
    assert line.split()[-3:] == ["1.23e+10", "-1.23e-05", "-2.50e+09"]


def test_a_metric_may_have_the_name_of_a_measure() -> None:
    table = RecordTable(20, 400, ["time"])
    assert _lines(table, {"mode": "test", "epoch": 20, "iteration": 400, "time": 0.25})[1].split() == [
        "test", "20/20", "400/400", "0.2500",
    ]  # fmt: skip


def test_large_memory_and_values_that_are_not_finite() -> None:
    line = _lines(RecordTable(1, 1), {**TRAIN, "memory": 81920.0, "loss": float("nan")})[1]
    assert "80.0GiB" in line
    assert line.split()[-2] == "nan"


def test_columns_that_do_not_fit_into_the_terminal_are_left_out() -> None:
    table = RecordTable(20, 400, ["accuracy", "recall"], width=80)
    assert _lines(table, TRAIN, {**VAL, "recall": 0.75}, {**TRAIN, "another_scalar": 1.0}) == [
        "       epoch     iter       lr      eta     time      loss  accuracy  …",
        "train   1/20   10/400  9.7e-04 26:03:04   47.5ms     1.984",
        "val     1/20   20/400                                1.676    0.8436  best",
        "train   1/20   10/400  9.7e-04 26:03:04   47.5ms     1.984",
    ]
