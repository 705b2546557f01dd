"""What platforms lack: hydraloop runs on Linux; it is imported, and prints messages, on all of them."""

from __future__ import annotations

import signal
import sys


def check() -> None:
    """Refuse to run on Windows.

    Raises:
        SystemExit: this is Windows.
    """
    if sys.platform == "win32":
        sys.exit("error: hydraloop does not run on Windows itself: run it in WSL (https://aka.ms/wslinstall).")


def signals(*names: str) -> tuple[signal.Signals, ...]:
    """Return the signals of these names that the platform has."""
    return tuple(getattr(signal, name) for name in names if hasattr(signal, name))
