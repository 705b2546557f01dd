"""`hooks=npu_profiler`: one message without torch_npu; with a stand-in for it, the records and their files."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hydraloop.engine.engine import Engine
from hydraloop.errors import UserError
from hydraloop.hooks import ProfilerHook
from tests.hooks.npu import torch_npu
from tests.hooks.test_profiler import STARTED, Watcher, _recording, _steps, stop_all
from tests.hooks.tiny_runs import batches, engine_of


@pytest.fixture(autouse=True)
def _no_profiler_left() -> Iterator[None]:
    yield
    stop_all()


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
