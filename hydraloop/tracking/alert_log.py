"""The alerts of a run, in `tracking/<hook name>.alerts.json`: an alert that is in it is not sent again. No torch."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from hydraloop.run_files import atomic
from hydraloop.tracking.tracker import FOLDER

_SUFFIX = ".alerts.json"


class AlertLog:
    """The alerts of one hook.

    Raises:
        OSError: raised by `write`: the disk is full.
    """

    def __init__(self, run_dir: Path, name: str) -> None:
        self._path = run_dir / FOLDER / f"{name}{_SUFFIX}"
        self.alerts = _read(self._path)
        """By the event, in the order of time: its `text`, `time`, and the channels that were told, `told`."""

    def begin(self, event: str, text: str, channels: list[str]) -> list[str]:
        """Add an alert, and return the channels to tell: none of them was told of this event, or is being told."""
        alert = self.alerts.setdefault(event, {"text": text, "time": time.time(), "told": []})
        left = [channel for channel in channels if channel not in alert["told"]]
        self._write()
        return left

    def note(self, event: str, channel: str, *, told: bool) -> None:
        """Note that a channel is being told of an event, or could not be told."""
        channels: list[str] = self.alerts[event]["told"]
        channels.append(channel) if told else channels.remove(channel)
        self._write()

    def _write(self) -> None:
        atomic.write_text(self._path, json.dumps(self.alerts, indent=1) + "\n")


def alerts(run_dir: Path) -> list[dict[str, Any]]:
    """Return the alerts of a run with `time`, in seconds since 1970, `text` and `told`, the newest last."""
    found = [alert for path in (run_dir / FOLDER).glob(f"*{_SUFFIX}") for alert in _read(path).values()]
    return sorted(found, key=lambda alert: alert["time"])


def lines(run_dir: Path) -> list[str]:
    """Return a line for each alert of a run, the newest last."""
    when = "%Y-%m-%d %H:%M:%S"
    return [f"{time.strftime(when, time.localtime(one['time']))}  {one['text']}" for one in alerts(run_dir)]


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the alerts in a file; none if there is no file, or another program has written it."""
    try:
        found = json.loads(path.read_bytes())
        return {
            str(event): {"text": str(a["text"]), "time": float(a["time"]), "told": list(a["told"])}
            for event, a in found.items()
        }
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return {}
