"""Messages go to the terminal and to a log file. One that cannot be written costs one line, not a traceback each."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from hydraloop.files import console

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
