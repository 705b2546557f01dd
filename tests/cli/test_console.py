"""Messages go to the terminal and to a log file. One that cannot be written costs one line, not a traceback each."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import hydraloop
from hydraloop.files import console
from hydraloop.files.console import ConsoleHandler, MaskingFormatter, of_user

FULL = Path("/dev/full")


@pytest.fixture
def root(monkeypatch: pytest.MonkeyPatch) -> Iterator[logging.Logger]:
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    monkeypatch.setattr(root, "level", root.level)
    yield root
    for handler in root.handlers:
        handler.close()


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_reported_once(root: logging.Logger, capfd: pytest.CaptureFixture[str]) -> None:
    console.set_up(False, FULL)
    for number in range(1000):
        root.info("message %d", number)
    assert capfd.readouterr().err == (
        "warning: full cannot be written: [Errno 28] No space left on device; messages are in the terminal only\n"
    )
    root.info("%d", "no number")
    assert "TypeError" in capfd.readouterr().err, "mistakes in messages are shown"
    [handler] = (one for one in root.handlers if isinstance(one, logging.FileHandler))
    with pytest.raises(OSError, match="No space left"):
        handler.close()
    handler.stream = None  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("verbose", "shown"),
    [(False, ""), (True, "debug: a\ndebug: b\n"), ("a", "debug: a\n"), (["a", "b"], "debug: a\ndebug: b\n")],
)
def test_messages_for_debugging(
    verbose: bool | str | list[str], shown: str, root: logging.Logger, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name in ("a", "b"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.NOTSET)
    console.set_up(verbose, tmp_path / "train.log")
    for name in ("a", "b"):
        logging.getLogger(name)._cache.clear()  # type: ignore[attr-defined]
        logging.getLogger(name).debug(name)
    assert capsys.readouterr().out == shown
    lines = (tmp_path / "train.log").read_text().splitlines()
    assert [line.partition("[DEBUG] ")[2] for line in lines] == [line[7:] for line in shown.splitlines()]


# Tracebacks: the terminal shows the frames of the user's code, and log files all frames. --------------------


def raised(source: str, path: Path) -> str:
    """Return the traceback of code in a file of the user, called by a package and calling one."""
    path.write_text(source, encoding="utf-8")
    names = {"nn": nn, "torch": torch}
    exec(compile(source, str(path), "exec"), names)
    try:
        nn.Sequential(names["Own"]())(torch.ones(2, 3))  # type: ignore[operator]  # the class is made by exec
    except Exception as error:
        return "".join(traceback.format_exception(error))
    raise AssertionError


OWN = """
class Own(nn.Module):
    def forward(self, x):
        return nn.Linear(4, 1)(x)
"""


def test_only_the_users_frames_and_the_last_one_are_shown(tmp_path: Path) -> None:
    full = raised(OWN, tmp_path / "own.py")
    lines = of_user(full).splitlines()
    files = [line.split('"')[1] for line in lines if line.startswith('  File "')]
    assert files == [__file__, str(tmp_path / "own.py"), files[-1]]
    assert files[-1].endswith("linear.py")
    assert sum("frames of hydraloop and packages" in line for line in lines) == 1
    assert "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x3 and 4x1)" in lines
    assert lines[-1].startswith("  train.log has all frames.")


def test_a_traceback_without_a_users_frame_is_whole(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = Path(hydraloop.__file__).parent / "engine" / "engine.py"
    text = f'Traceback (most recent call last):\n  File "{package}", line 1, in train\n    x\nKeyError: 1\n'
    assert of_user(text) == text
    full = raised(OWN, tmp_path / "own.py")
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    assert of_user(full) == full


def test_files_get_what_the_terminal_does_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, terminal, file = logging.Logger("own"), ConsoleHandler(), logging.FileHandler(tmp_path / "train.log")
    for handler in (terminal, file):
        handler.setFormatter(MaskingFormatter("%(message)s"))
        log.addHandler(handler)
    try:
        raise ZeroDivisionError
    except ZeroDivisionError as error:
        log.error("the cause", exc_info=error, extra={"in_files": True})
    log.error("the mistake")
    file.close()
    assert capsys.readouterr().err == "error: the mistake\n"
    assert "ZeroDivisionError" in (tmp_path / "train.log").read_text()
