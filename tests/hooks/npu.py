"""A stand-in for the package torch_npu, which only machines with Ascend NPUs have: its profiler is torch's.

It has what `torch_npu.profiler` documents and ProfilerHook uses. Like torch_npu it records where the handler was
told to, which was made before the profiler started, and else in the working directory.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_SOURCE = """
import enum
import json
from pathlib import Path

import torch.profiler
from torch.profiler import ProfilerAction, schedule

folder = None


class ProfilerActivity(enum.Enum):
    CPU = "cpu"
    NPU = "npu"


def tensorboard_trace_handler(dir_name=None, worker_name=None, analyse_flag=True, async_mode=False):
    global folder
    folder = Path(dir_name) / "host_1_ascend_pt"

    def handler(profiler):
        if analyse_flag:
            output = profiler.folder / "ASCEND_PROFILER_OUTPUT"
            output.mkdir()
            profiler.export_chrome_trace(str(output / "trace_view.json"))

    return handler


class profile(torch.profiler.profile):
    def __init__(self, *, activities=None, **options):
        super().__init__(activities=[torch.profiler.ProfilerActivity.CPU], **options)
        self.asked = activities

    def start(self):
        self.folder = folder or Path("host_1_ascend_pt")
        self.folder.mkdir(parents=True)
        (self.folder / "profiler_info.json").write_text(json.dumps([each.name for each in self.asked]))
        super().start()
"""


@contextmanager
def torch_npu(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Puts the stand-in into `folder` and makes it importable."""
    package = folder / "torch_npu"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "profiler.py").write_text(_SOURCE)
    with monkeypatch.context() as patched:
        patched.syspath_prepend(folder)
        try:
            yield
        finally:
            for name in ("torch_npu.profiler", "torch_npu"):
                sys.modules.pop(name, None)
