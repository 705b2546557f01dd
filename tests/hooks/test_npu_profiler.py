"""NPUProfilerHook: one message without torch_npu; with a stand-in for it, the records and their files."""

from __future__ import annotations

import importlib.util
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hydraloop.engine.engine import Engine
from hydraloop.errors import UserError
from hydraloop.hooks import NPUProfilerHook
from tests.hooks.npu import torch_npu
from tests.hooks.test_profiler import STARTED, Watcher, _recording, _steps, stop_all
from tests.hooks.tiny_runs import batches, engine_of


@pytest.fixture(autouse=True)
def _no_profiler_left() -> Iterator[None]:
    yield
    stop_all()


def _engine(run_dir: Path, hook: NPUProfilerHook, **settings: Any) -> tuple[Engine, Watcher]:
    STARTED.append(hook)
    watcher = Watcher(settings.pop("fail_at", None))
    return engine_of(
        run_dir, {"npu_profiler": hook, "watcher": watcher}, train=batches(8), max_epochs=2, **settings
    ), watcher


@pytest.fixture
def npu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    with torch_npu(tmp_path / "packages", monkeypatch):
        yield


def _folder(run_dir: Path) -> Path:
    return run_dir / "tf_tracing_logs" / "host_1_ascend_pt"


@pytest.mark.skipif(importlib.util.find_spec("torch_npu") is not None, reason="torch_npu is installed")
def test_without_torch_npu_there_is_one_message_before_training(tmp_path: Path) -> None:
    engine, _ = _engine(tmp_path, NPUProfilerHook())
    with pytest.raises(UserError, match="torch_npu cannot be imported: No module named 'torch_npu'") as raised:
        engine.train()
    assert raised.value.key == "hooks.npu_profiler"
    assert "hooks=profiler" in str(raised.value.remedy)
    assert engine.progress.iteration == 0


def test_by_default_three_iterations_analysed(
    npu: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="hydraloop.hooks.npu_profiler")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    engine, watcher = _engine(tmp_path / "run", NPUProfilerHook())
    engine.train()
    trace = _folder(tmp_path / "run") / "ASCEND_PROFILER_OUTPUT" / "trace_view.json"
    assert _steps(trace) == ["ProfilerStep#2", "ProfilerStep#3", "ProfilerStep#4"]
    assert watcher.recording == [2, 3, 4]
    assert not _recording()
    assert json.loads((_folder(tmp_path / "run") / "profiler_info.json").read_text()) == ["CPU"]
    assert list((tmp_path / "elsewhere").iterdir()) == [], "nothing in the working directory"
    assert "MindStudio Insight" in caplog.text


def test_a_chrome_trace_without_the_analysis(npu: None, tmp_path: Path) -> None:
    hook = NPUProfilerHook(on_trace_ready=None, json_trace_path="trace.json", schedule=None, profile_memory=False)
    _engine(tmp_path, hook)[0].train()
    assert _steps(tmp_path / "trace.json") == [f"ProfilerStep#{step}" for step in range(8)]
    assert not (_folder(tmp_path) / "ASCEND_PROFILER_OUTPUT").exists()
    assert "profile_memory" not in json.loads((tmp_path / "trace.json").read_text())


@pytest.mark.parametrize(("with_npu", "expected"), [(None, ["CPU", "NPU"]), (False, ["CPU"])])
def test_on_an_npu_its_kernels_are_recorded(
    with_npu: bool | None, expected: list[str], npu: None, tmp_path: Path
) -> None:
    engine, _ = _engine(tmp_path, NPUProfilerHook(activity_with_npu=with_npu), val=False)
    object.__setattr__(engine.run, "device", torch.device("meta"))  # any other than the CPU, which still computes
    engine.train()
    assert json.loads((_folder(tmp_path) / "profiler_info.json").read_text()) == expected


def test_every_option_reaches_the_profiler(npu: None, tmp_path: Path) -> None:
    got: list[Any] = []
    hook = NPUProfilerHook(
        by_epoch=False,
        profile_times=6,
        schedule={"wait": 0, "warmup": 1, "active": 2, "repeat": 1},
        on_trace_ready=got.append,
        record_shapes=True,
        with_stack=True,
        with_flops=True,
    )
    _, watcher = _run(tmp_path, hook)
    [trace] = got
    assert (trace.record_shapes, trace.profile_memory, trace.with_stack, trace.with_flops) == (True, True, True, True)
    assert watcher.recording == [1, 2]


def _run(run_dir: Path, hook: NPUProfilerHook, **settings: Any) -> tuple[Engine, Watcher]:
    engine, watcher = _engine(run_dir, hook, **settings)
    engine.train()
    return engine, watcher


def test_it_stops_when_training_fails(npu: None, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="on purpose"):
        _run(tmp_path, NPUProfilerHook(), fail_at=3)
    assert not _recording()
    assert "ProfilerStep#2" in _steps(_folder(tmp_path) / "ASCEND_PROFILER_OUTPUT" / "trace_view.json")


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"profile_times": 0}, "profile_times"),
        ({"schedule": {"active": 0}}, "schedule.active"),
        ({"on_trace_ready": "log_trace"}, "on_trace_ready"),
        ({"activity_with_cpu": False, "activity_with_npu": False}, "activity_with_cpu"),
    ],
)
def test_mistakes_name_the_option(options: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as raised:
        NPUProfilerHook(**options)
    assert raised.value.key == key
    assert raised.value.remedy


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"activity_with_npu": True}, "activity_with_npu"),
        ({"activity_with_cpu": False}, "activity_with_cpu"),
    ],
)
def test_what_does_not_fit_the_run_is_refused(options: dict[str, Any], key: str, npu: None, tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        _run(tmp_path, NPUProfilerHook(**options))
    assert raised.value.key == f"hooks.npu_profiler.{key}"
