"""ProgressHook and ConsoleHandler with a terminal and without one."""

from __future__ import annotations

import fcntl
import io
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
from rich.file_proxy import FileProxy

from hydraloop.engine.engine import Engine
from hydraloop.engine.hook import Hook
from hydraloop.files.console import ConsoleHandler
from hydraloop.hooks import progress
from hydraloop.hooks.progress import ProgressHook
from tests.helpers import batches, make_engine

ROOT = Path(__file__).parents[2]
COLUMNS = 80
LONG = "a line longer than the terminal is wide " * 3 + "[bold]with markup[/bold] and its end"

SCRIPT = f"""
import logging, sys, torch
from pathlib import Path
from hydraloop.files.console import ConsoleHandler
from hydraloop.engine.engine import Engine
from hydraloop.engine.loaders import Loaders
from hydraloop.engine.run_parts import Settings
from hydraloop.engine.hook import Hook
from hydraloop.hooks import IterTimerHook, LoggerHook, ProgressHook, RuntimeInfoHook
from hydraloop.tasks.task import Task

class Talker(Hook):
    def after_train_iter(self, engine, batch_idx, batch, outputs):
        if engine.progress.iteration == 3:
            logging.getLogger("talker").info({LONG!r})
        if engine.progress.iteration == 5:
            logging.getLogger("talker").warning("a warning")
            print("printed")
        if engine.progress.iteration == 7 and "fail" in sys.argv:
            raise RuntimeError("on purpose")

logging.basicConfig(level=logging.INFO, handlers=[ConsoleHandler()], format="%(message)s")
model = torch.nn.Linear(2, 1)
batches = [(torch.randn(4, 2), torch.randn(4, 1))] * 10
hooks = dict(
    runtime_info=RuntimeInfoHook(), timer=IterTimerHook(), logger=LoggerHook(interval=5),
    progress=ProgressHook(refresh_per_second=1e6), talker=Talker(),
)
engine = Engine(
    task=Task(model, torch.nn.MSELoss()), optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    loaders=Loaders(batches, batches[:1]), hooks=hooks, settings=Settings(max_epochs=2, device="cpu"),
    run_dir=Path(sys.argv[1]),
)
try:
    engine.train()
except RuntimeError as error:
    print("stopped by", error)
print("stdout is", type(sys.stdout).__name__)
"""


def _command(tmp_path: Path, *more: str) -> list[str]:
    return [sys.executable, "-W", "error", "-c", SCRIPT, str(tmp_path), *more]


def _environment() -> dict[str, str]:
    return {**os.environ, "TERM": "xterm-256color", "PYTHONPATH": str(ROOT)}


def _in_terminal(command: list[str]) -> str:
    """Everything the command writes to a terminal of 80 columns, its standard output and error."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 24, COLUMNS, 0, 0))
    environment = {name: value for name, value in _environment().items() if name not in ("COLUMNS", "NO_COLOR", "CI")}
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment)
    os.close(theirs)
    written = b""
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # Linux's way to say that the other end is closed.
            break
        if not chunk:
            break
        written += chunk
    os.close(ours)
    assert process.wait() == 0, written.decode()
    return written.decode()


def _plain(text: str) -> str:
    """The text without colours; what is erased from a line (`\\r`, `ESC[2K`) starts a new one."""
    text = re.sub(r"\x1b\[[0-9;]*m|\x1b\[\?25[lh]", "", text)
    return re.sub(r"\r\n|\r\x1b\[2K|\r", "\n", text)


@pytest.mark.slow
def test_bar_in_a_terminal(tmp_path: Path) -> None:
    written = _in_terminal(_command(tmp_path))
    lines = _plain(written).split("\n")
    bars = [line for line in lines if "━" in line]
    assert len(bars) > 15
    assert any(re.match(r"epoch 1/2 ━+.* 7/20 [\d.]+ it/s eta 0:00:0\d loss \d", bar) for bar in bars)
    assert any(re.match(r"val 1/2 .* 10/20 ", bar) for bar in bars)
    assert any(re.match(r"epoch 1/2 .* 10/20 .* val loss", bar) for bar in bars)
    assert "epoch 2/2" in bars[-1]
    assert "20/20" in bars[-1]
    assert "val loss" in bars[-1]
    assert all(len(bar) <= COLUMNS for bar in bars)
    # Whole lines of the log and of print, in order, not mixed with the bar.
    assert [line for line in lines if line in (LONG, "warning: a warning", "printed")] == [
        LONG, "warning: a warning", "printed",
    ]  # fmt: skip
    assert sum(re.match(r"train +1/2 +5/20 +1\.0e-01 +0:00:0\d ", line) is not None for line in lines) == 1
    if (
        int(version("rich").partition(".")[0]) >= 15
    ):  # before, its stand-in for stdout does not say that it is a terminal
        assert re.search("\x1b\\[[0-9;]*32m *val [^\n]*best", written), "the best validation is green"
    # The terminal is restored: the cursor is on, and so is the original sys.stdout.
    assert written.rindex("\x1b[?25h") > written.rindex("\x1b[?25l")
    assert "stdout is TextIOWrapper" in lines


class Shown:
    """Runs in this process, with a clock that moves a twentieth of a second an iteration."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.completed: list[int] = []
        monkeypatch.setattr(progress, "perf_counter", self._clock)

    def _clock(self) -> float:
        self.now += 0.05
        return self.now

    def run(self, tmp_path: Path, **options: Any) -> ProgressHook:
        """Train 20 iterations; keep the count at each drawing."""
        hook = ProgressHook(**options)
        update = hook._update

        def _update(engine: Engine, doing: str) -> None:
            if hook._bar is not None:
                self.completed.append(engine.progress.iteration)
            update(engine, doing)

        hook._update = _update  # type: ignore[method-assign]
        make_engine(tmp_path, {"progress": hook}, train=batches(20)).train()
        return hook


def test_updates_are_limited_by_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown = Shown(monkeypatch)
    shown.run(tmp_path, enabled=True, refresh_per_second=4)
    # A quarter of a second is five iterations; the last drawing is the one at the end.
    assert shown.completed == [1, 6, 11, 16, 20]
    assert "20/20" in capsys.readouterr().out


class Stdout(Hook):
    """Keeps whether the bar has sys.stdout; called after the bar's hook; may fail."""

    priority = 100

    def __init__(self, *, fail: bool) -> None:
        self.taken: dict[str, bool] = {}
        self._fail = fail

    def after_train_iter(self, engine: Engine, batch_idx: int, batch: Any, outputs: Any) -> None:
        self._look("after_train_iter")
        if self._fail:
            raise RuntimeError("on purpose")

    def on_exception(self, engine: Engine, error: BaseException) -> None:
        self._look("on_exception")

    def after_train(self, engine: Engine) -> None:
        self._look("after_train")

    def _look(self, point: str) -> None:
        self.taken[point] = isinstance(sys.stdout, FileProxy)


@pytest.mark.usefixtures("capsys")
@pytest.mark.parametrize("fail", [False, True])
def test_stdout_is_restored_before_anything_else_is_printed(tmp_path: Path, fail: bool) -> None:
    stdout = Stdout(fail=fail)
    engine = make_engine(tmp_path, {"progress": ProgressHook(enabled=True), "stdout": stdout}, train=batches(1))
    if fail:
        with pytest.raises(RuntimeError, match="on purpose"):
            engine.train()
    else:
        engine.train()
    assert stdout.taken.pop("after_train_iter")
    assert set(stdout.taken) == ({"on_exception", "after_train"} if fail else {"after_train"})
    assert not any(stdout.taken.values())


@pytest.mark.parametrize("options", [{"enabled": False}, {}])
def test_without_a_bar_nothing_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: dict[str, Any]
) -> None:
    shown = Shown(monkeypatch)
    shown.run(tmp_path, **options)
    assert shown.completed == []
    assert capsys.readouterr().out == ""


def test_console_follows_sys_stdout_and_names_levels(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    handler = ConsoleHandler()
    logger = logging.Logger("test")
    logger.addHandler(handler)
    logger.info("to %s", "one")
    assert capsys.readouterr().out == "to one\n"
    with capsys.disabled(), open(os.devnull, "w") as elsewhere, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", elsewhere)
        logger.info("to another")
    logger.error("careful")
    assert capsys.readouterr().err == "error: careful\n"


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("environment", "colours"),
    [({}, True), ({"NO_COLOR": "1"}, False), ({"TERM": "dumb"}, False), ({"TERM": ""}, False)],
)
def test_only_a_terminal_has_colours(
    environment: dict[str, str], colours: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"TERM": "xterm", "NO_COLOR": "", **environment}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "stdout", stdout := Terminal())
    logger = logging.Logger("test")
    logger.addHandler(ConsoleHandler())
    logger.info("plain", extra={"style": "train"})
    logger.info("val 1/2\nmore", extra={"style": "best"})
    logger.warning("careful")
    coloured = "plain\n\x1b[32mval 1/2\x1b[0m\nmore\n\x1b[33mwarning: careful\x1b[0m\n"
    assert stdout.getvalue() == (coloured if colours else "plain\nval 1/2\nmore\nwarning: careful\n")
