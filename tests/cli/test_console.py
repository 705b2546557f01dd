"""A log file that cannot be written costs one line in the terminal, not a traceback for each message."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from hydraloop.cli.console import prepare_handlers

FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="this system has no /dev/full")
def test_a_full_disk_is_reported_once(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    root, handler = logging.getLogger(), logging.FileHandler(FULL)
    monkeypatch.setattr(root, "handlers", [handler])
    prepare_handlers()
    prepare_handlers()
    for number in range(1000):
        root.warning("message %d", number)
    assert capfd.readouterr().err == (
        "warning: full cannot be written: [Errno 28] No space left on device; messages are in the terminal only\n"
    )
    root.warning("%d", "no number")
    assert "TypeError" in capfd.readouterr().err, "mistakes in messages are shown"
    with pytest.raises(OSError, match="No space left"):
        handler.close()
    handler.stream = None
