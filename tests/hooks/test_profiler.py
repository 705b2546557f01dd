"""ProfilerHook: traces of real runs, and a profiler that always stops."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hydraloop.engine.distributed.comm import Distributed
from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.errors import UserError
from hydraloop.hooks.profiler import ProfilerHook
from tests.hooks.npu import torch_npu
from tests.hooks.tiny_runs import batches, engine_of
from tests.ranks import on_ranks


class Watcher(Hook):
    """Keeps the iterations after which a profiler was recording; may fail after one."""

    priority = 100

    def __init__(self, fail_at: int | None = None) -> None:
        self.recording: list[int] = []
        self._fail_at = fail_at

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        if _recording():
            self.recording.append(engine.progress.iteration)
        if engine.progress.iteration == self._fail_at:
            raise RuntimeError("on purpose")


def _recording() -> bool:
    return bool(torch.autograd.profiler._is_profiler_enabled)


STARTED: list[ProfilerHook] = []


def stop_all() -> None:
    """Stop the profiler of a failing test, which would crash the process at its end."""
    for hook in STARTED:
        if hook._profile is not None:
            hook._handlers.clear()
            hook._profile.stop()
    STARTED.clear()


@pytest.fixture(autouse=True)
def _no_profiler_left() -> Iterator[None]:
    yield
    stop_all()


def _run(tmp_path: Path, hook: ProfilerHook, *, fail_at: int | None = None) -> Watcher:
    watcher = Watcher(fail_at)
    STARTED.append(hook)
    engine_of(tmp_path, {"profiler": hook, "watcher": watcher}, train=batches(8), max_epochs=2).train()
    return watcher


def _steps(trace: Path) -> list[str]:
    """The iterations in a trace file, by torch's name for them."""
    events = json.loads(trace.read_text())["traceEvents"]
    return sorted({event["name"] for event in events if event.get("name", "").startswith("ProfilerStep#")})


def _tensorboard_traces(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "tf_tracing_logs").glob("*.pt.trace.json"))


def test_by_default_three_iterations_in_a_file_and_a_table(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="hydraloop.hooks.profiler")
    watcher = _run(tmp_path, ProfilerHook())
    [trace] = _tensorboard_traces(tmp_path)
    assert _steps(trace) == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
    events = json.loads(trace.read_text())["traceEvents"]
    assert re.fullmatch(r".+_\d+\.\d+\.pt\.trace\.json", trace.name), "TensorBoard's: node, process and time"
    assert {"aten::addmm", "Optimizer.step#SGD.step", "[memory]"} <= {event.get("name") for event in events}
    # The third to the fifth iteration are recorded.
    assert watcher.recording == [2, 3, 4]
    assert not _recording()
    messages = [record.getMessage() for record in caplog.records]
    assert "chrome://tracing" in messages[0]
    assert str(trace.name) in messages[0]
    assert "sorted by self_cpu_time_total" in messages[1]
    own = [float(row.split()[1].rstrip("%")) for row in messages[1].splitlines() if "aten::" in row]
    assert own == sorted(own, reverse=True) != []


def test_without_a_schedule_whole_epochs(tmp_path: Path) -> None:
    watcher = _run(tmp_path, ProfilerHook(schedule=None, profile_times=1, on_trace_ready="tb_trace"))
    [trace] = _tensorboard_traces(tmp_path)
    assert _steps(trace) == [f"ProfilerStep#{step}" for step in range(8)]
    assert watcher.recording == list(range(1, 8))


def test_without_a_schedule_a_number_of_iterations(tmp_path: Path) -> None:
    watcher = _run(tmp_path, ProfilerHook(schedule=None, by_epoch=False, profile_times=10))
    [trace] = _tensorboard_traces(tmp_path)
    assert _steps(trace) == [f"ProfilerStep#{step}" for step in range(10)]
    assert watcher.recording == list(range(1, 10))


def test_cycles_each_have_a_trace(tmp_path: Path) -> None:
    hook = ProfilerHook(
        schedule={"wait": 1, "warmup": 1, "active": 1, "repeat": 2}, on_trace_ready=["chrome_trace", "tb_trace"]
    )
    _run(tmp_path, hook)
    assert [_steps(trace) for trace in _tensorboard_traces(tmp_path)] == [["ProfilerStep#2"], ["ProfilerStep#5"]]
    assert _steps(tmp_path / "tf_tracing_logs" / "chrome_trace.json") == ["ProfilerStep#5"]


def test_the_chrome_trace_is_at_the_given_path(tmp_path: Path) -> None:
    _run(tmp_path, ProfilerHook(json_trace_path="here/trace.json"))
    [trace] = _tensorboard_traces(tmp_path)
    assert (tmp_path / "here" / "trace.json").read_bytes() == trace.read_bytes()


def test_shapes_stacks_and_flops_are_recorded_when_asked(tmp_path: Path) -> None:
    _run(tmp_path, ProfilerHook(record_shapes=True, with_stack=True, with_flops=True, profile_memory=False))
    [trace] = _tensorboard_traces(tmp_path)
    content = json.loads(trace.read_text())
    assert (content["record_shapes"], content["with_stack"], content["with_flops"]) == (1, 1, 1)
    assert "profile_memory" not in content
    assert any("Input Dims" in event.get("args", {}) for event in content["traceEvents"])


@pytest.mark.parametrize("path", ["/x/trace.json", "../trace.json", "a/../../trace.json", "trace.py"])
def test_a_trace_is_in_the_run_directory(path: str) -> None:
    with pytest.raises(UserError, match="json_trace_path"):
        ProfilerHook(json_trace_path=path)


def test_the_profiler_stops_when_training_fails(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        _run(tmp_path, ProfilerHook(), fail_at=3)
    assert not _recording()
    [trace] = _tensorboard_traces(tmp_path)
    assert "ProfilerStep#2" in _steps(trace)


def test_a_run_shorter_than_the_schedule_leaves_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    _run(tmp_path, ProfilerHook(by_epoch=False))
    assert "there is no trace" in caplog.text


def test_an_error_in_a_handler_does_not_end_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def broken(trace: Any) -> None:
        raise OSError("disk full")

    # The second cycle begins when the first ends: torch would crash at an error in between.
    schedule = {"wait": 0, "warmup": 1, "active": 1, "repeat": 2}
    watcher = _run(tmp_path, ProfilerHook(schedule=schedule, on_trace_ready=broken))
    assert watcher.recording == [1, 3]
    assert not _recording()
    assert caplog.text.count("OSError: disk full") >= 2


def on_rank(distributed: Distributed, run_dir: str) -> None:
    """A run on its rank."""
    hooks = {"profiler": ProfilerHook(on_trace_ready="tb_trace")}
    options: dict[str, Any] = {"train": batches(8), "val": False, "max_epochs": 1, "distributed": distributed}
    engine_of(Path(run_dir), hooks, **options).train()


def test_only_rank_0_is_profiled(tmp_path: Path) -> None:
    on_ranks(2, on_rank, str(tmp_path))
    [trace] = _tensorboard_traces(tmp_path)
    content = json.loads(trace.read_text())
    assert {name: content["distributedInfo"][name] for name in ("backend", "rank", "world_size")} == {
        "backend": "gloo",
        "rank": 0,
        "world_size": 2,
    }
    assert any("gloo:all_reduce" in event["name"] for event in content["traceEvents"])


# `hooks=npu_profiler`: one message without torch_npu; with a stand-in for it, the records and their f -----------------


@pytest.fixture
def npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with torch_npu(tmp_path / "packages", monkeypatch):
        yield


def _hook(**options: Any) -> ProfilerHook:
    return ProfilerHook(**{"activity_with_npu": None, "on_trace_ready": "tb_trace", **options})


def _engine(run_dir: Path, hook: ProfilerHook, **settings: Any) -> tuple[Engine, Watcher]:
    STARTED.append(hook)
    watcher = Watcher(settings.pop("fail_at", None))
    return engine_of(
        run_dir, {"npu_profiler": hook, "watcher": watcher}, train=batches(8), max_epochs=2, **settings
    ), watcher


def _folder(run_dir: Path) -> Path:
    return run_dir / "tf_tracing_logs" / "host_1_ascend_pt"


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_without_torch_npu_there_is_one_message_before_training(tmp_path: Path) -> None:
    engine, _ = _engine(tmp_path, _hook())
    with pytest.raises(UserError, match="torch_npu cannot be imported: No module named 'torch_npu'") as raised:
        engine.train()
    assert raised.value.key == "hooks.npu_profiler"
    assert "hooks=profiler" in str(raised.value.remedy)
    assert engine.progress.iteration == 0


def test_by_default_three_iterations_analysed(npu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    engine, watcher = _engine(tmp_path / "run", _hook())
    engine.train()
    trace = _folder(tmp_path / "run") / "ASCEND_PROFILER_OUTPUT" / "trace_view.json"
    assert _steps(trace) == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
    assert watcher.recording == [2, 3, 4]
    assert not _recording()
    assert json.loads((_folder(tmp_path / "run") / "profiler_info.json").read_text()) == ["CPU"]
    assert list((tmp_path / "elsewhere").iterdir()) == [], "nothing in the working directory"


def test_on_an_npu_its_kernels_are_recorded(npu: None, tmp_path: Path) -> None:
    engine, _ = _engine(tmp_path, _hook(), val=False)
    object.__setattr__(engine.run, "device", torch.device("meta"))  # any other than the CPU, which still computes
    engine.train()
    assert json.loads((_folder(tmp_path) / "profiler_info.json").read_text()) == ["CPU", "NPU"]
