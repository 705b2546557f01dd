"""Runs whose files are written by hand, and what a page of a report shows."""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hydraloop.commands.command_line import view
from hydraloop.files.metrics_writer import RecordLog
from hydraloop.files.result import Objective, Result

HOSTILE = '<script>alert(1)</script><a href="javascript:alert(2)">x</a><img src=http://x.invalid onerror=alert(3)>'
"""A name that must not become a part of the page."""

_SUBJECT = "experiment_name: arms\ntask: {model: {_target_: model.Net}}\ndata: {train: {_target_: data.Spirals}}\n"


class Page(HTMLParser):
    """What a page contains.

    Args:
        file: of the page.
    """

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.source = file.read_text(encoding="utf-8")
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: set[str | None] = set()
        self.targets: set[str | None] = set()
        self.text = ""
        self._in: str | None = None
        self.feed(re.sub(r"<script>.*?</script>", "", self.source, flags=re.DOTALL))
        found = re.findall(r'<script type="application/json" id="figure-\d+">(.*?)</script>', self.source)
        self.figures: list[dict[str, Any]] = [json.loads(text) for text in found]

    def handle_starttag(self, tag: str, attrs: Iterable[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links |= {value for name, value in attrs if name == "href"}
        self.targets |= {f"#{value}" for name, value in attrs if name == "id"}
        self._in = tag

    def handle_data(self, data: str) -> None:
        if self._in not in ("script", "style"):
            self.text += data

    @property
    def body(self) -> str:
        """The part that is neither script nor style."""
        return self.source.partition("<main>")[2].partition("</main>")[0]

    @property
    def facts(self) -> dict[str, str]:
        """The facts in the head, by name."""
        return dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", self.source))

    @property
    def commands(self) -> list[str]:
        """The commands in the head that can be copied."""
        return re.findall(r"<pre><code>([^<]*)</code><button", self.source)

    @property
    def captions(self) -> list[str]:
        """The titles of the figures, without those of the reports of jobs."""
        return re.findall(r"<figcaption>(.*?)</figcaption>", self.source.partition("<article")[0])

    def figure(self, title: str) -> dict[str, Any]:
        """Return the figure with a title. Its numbers are approximate."""
        found: dict[str, Any] = self.figures[self.captions.index(title)]
        for trace in found["data"]:
            for axis in ("x", "y"):
                values = trace[axis]
                if isinstance(values, dict):
                    values = np.frombuffer(base64.b64decode(values["bdata"]), "<f4").tolist()
                trace[axis] = [pytest.approx(value, nan_ok=True) for value in values]
        return found


def report(*arguments: str | Path) -> int:
    """Run the command in this process, and return its exit code."""
    return view(["report", *map(str, arguments)])


def write_run(path: Path, *, count: int = 20, name: str = "accuracy", lr: str = "0.01") -> Path:
    """Write the files of a run that has finished."""
    (path / ".hydra").mkdir(parents=True)
    (path / ".hydra" / "config.yaml").write_text(f"seed: 0\noptimizer: {{lr: {lr}}}\n{_SUBJECT}", encoding="utf-8")
    (path / "train.log").write_text("model      Net, 4,547 parameters\ndata       train 9 samples\n", encoding="utf-8")
    (path / ".hydra" / "overrides.yaml").write_text(f"- optimizer.lr={lr}\n", encoding="utf-8")
    log = RecordLog(path / "metrics.jsonl")
    for number in range(1, count + 1):
        place = {"epoch": 1, "iteration": 10 * number}
        speed = {"time": 0.02, "data_time": 0.001, "memory": 100.0}
        log.append({"mode": "train", **place, "lr": float(lr), **speed, "loss": 1 / number})
        if number % 5 == 0:
            log.append({"mode": "val", **place, name: 1 - 1 / number})
    log.close()
    Result("finished", objective=Objective(name, "greater", 1 - 1 / count, 10 * count), seconds=3.0).write(path)
    return path
