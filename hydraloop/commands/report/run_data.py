"""RunData: what the files of a run say, and its curves. Files may be missing, and others may have written them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from hydraloop.commands.status import state_of_run
from hydraloop.errors import UserError
from hydraloop.files import lock, run_directory
from hydraloop.files.changes import ABSENT
from hydraloop.files.config_yaml import loaded
from hydraloop.files.environment import shown
from hydraloop.files.metrics_log import FILENAME, Record, read_some
from hydraloop.files.result import Result
from hydraloop.files.run_directory import config_file
from hydraloop.files.secrets import mask_command

_START = 65_536
"""Characters at the start of a log, which name the model and the data."""
_LEFT_OUT = frozenset({"perf/eta", "perf/skipped", "train/momentum"})
_TITLES = {  # in this order
    "loss": "loss",
    "accuracy": "accuracy",
    "": "other metrics",
    "lr": "Learning rate",
    "grad_norm": "Gradient norm",
    "samples_per_second": "Throughput [samples/s]",
    "time": "Time of an iteration [s]",
    "memory": "Peak memory [MiB]",
}
_NEARLY_CONSTANT = 1.05
"""The ratio of the greatest and the least memory up to which there is no chart of it."""
ACCENT, QUIET = "#e8590c", "#868e96"
"""Colors of the best curve and of the others, on light and on dark pages."""
_COLORS = ("#1f77b4", "#f08c00", "#2f9e44", "#d6336c", "#7048e8", "#0c8599", "#a87132", QUIET)
"""Of curves that have a number."""
DASHES = ("solid", "dot", "dash", "dashdot")
"""Of curves of a chart that have the same color and width."""
LAYOUT = {"xaxis": {"title": {"text": "iteration"}}, "hovermode": "closest"}
"""Layout of plotly for a chart over the iterations."""


@dataclass(frozen=True, slots=True)
class Curve:
    """A number of a run over the completed iterations."""

    iterations: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class RunData:
    """A run."""

    path: Path
    points: int = 2000
    """The most points of a curve. A screen has fewer columns."""

    @cached_property
    def records(self) -> list[Record]:
        """All records of a short run, and evenly spread ones of a long run."""
        return read_some(self.path / FILENAME, self.points)

    @cached_property
    def curves(self) -> dict[str, Curve]:
        """The numbers by name, such as `train/loss`."""
        found: defaultdict[str, list[tuple[int, float]]] = defaultdict(list)
        for record in self.records:
            for name, value in record.metrics.items():
                found[name].append((self._iteration_of(record), value))
        columns = {name: np.array(points, dtype=np.float64).T for name, points in found.items()}
        return {name: Curve(x, y) for name, (x, y) in columns.items()}

    def _iteration_of(self, record: Record) -> int:
        """Return the completed iterations of the weights: the test at the end is one of the best checkpoint."""
        result = self.result
        if result is None or result.best is None or result.best_checkpoint is None or record.mode != "test":
            return record.iteration
        return result.best.iteration if record.iteration == result.progress.get("iteration") else record.iteration

    @cached_property
    def result(self) -> Result | None:
        """How the run has ended; None while it runs: a run that continues has an older result."""
        return None if lock.holder(self.path) is not None else Result.read(self.path)

    @cached_property
    def status(self) -> str:
        """The state of the run, as `hydraloop status` prints it."""
        return state_of_run(self.path).state

    @cached_property
    def config(self) -> Any:
        """The config as it was composed, not resolved; None if it cannot be read."""
        file = config_file(self.path)
        try:
            return None if file is None else OmegaConf.to_container(loaded(file, file), resolve=False)
        except UserError:
            return None

    @property
    def command(self) -> str | None:
        """The commands that start such a run and resume it, secrets masked; None for a run started from Python."""
        if self.file(".hydra/overrides.yaml") is None:
            return None
        first, *resumed = run_directory.typed_by_attempt(self.path)
        if resumed:  # by lines that name the directory
            first = [*first, f"hydra.run.dir={shown(self.path)}"]
        words = [first]
        for typed in resumed:
            left = [line for line in typed if not line.startswith("resume=")]  # the whole command, typed again
            is_whole = len(left) < len(typed)
            words.append([*left, f"resume={shown(self.path)}"] if is_whole else ["resume", shown(self.path), *typed])
        return "\n".join(mask_command(["python", "train.py", *line]) for line in words)

    @cached_property
    def subject(self) -> dict[str, str | None]:
        """What was trained: the model, its parameters, the data and the experiment, as far as config and log say it."""
        log, start = self.file("train.log"), ""
        if log is not None:
            with log.open(encoding="utf-8", errors="replace") as file:
                start = file.read(_START)
        model, data = (re.search(line, start) for line in (r"model +(\S+), ([\d,]+) parameters", r"\ndata +(.+)"))
        names = {key: self.value(key).rpartition(".")[2] for key in ("task.model", "data.train")}
        found = {"model": model[1] if model else names["task.model"], "parameters": model and model[2]}
        found["data"] = f"{names['data.train']}: {data[1]}" if data else names["data.train"]
        found["experiment"] = self.value("experiment_name")
        return {name: value for name, value in found.items() if value != ABSENT}

    def value(self, key: str) -> str:
        """Return the value of a key of the config as text; of a node, the name of its class."""
        found = self.config
        for name in key.split("."):
            if not isinstance(found, dict) or name not in found:
                return ABSENT
            found = found[name]
        if isinstance(found, dict):
            return str(found.get("_target_", "{…}"))
        return "null" if found is None else str(found)

    def file(self, relative: str) -> Path | None:
        """Return a file of the run; None if it does not exist, or is elsewhere (a link)."""
        path = self.path / relative
        return path if path.is_file() and path.resolve().is_relative_to(self.path.resolve()) else None


def charts(runs: Mapping[str, Mapping[str, Curve]]) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Yield the title and the traces of each chart: the loss first, then metrics, then lr, speed and memory.

    A memory that hardly changes has no chart: the head of the page has its peak.

    Args:
        runs: the curves of each run, by its name in the legend. The name of a single run is not shown.
    """
    groups: dict[str, list[dict[str, Any]]] = {}
    for number, (label, named) in enumerate(runs.items()):
        for name, curve in named.items():
            if name in _LEFT_OUT:
                continue
            mode, _, rest = name.partition("/")
            group, _, chart = rest.rpartition("/")
            series = f"{mode} {group}".strip().removeprefix("perf")
            if rest.split("/")[0] == "lr":
                chart, series = "lr", rest[3:]
            elif rest == "data_time":
                chart, series = "time", "waiting for data"
            text = f"{label} {series}".strip() if len(runs) > 1 else series or chart
            drawn = groups.setdefault(chart, [])
            one = trace(curve, text, color=number if len(runs) > 1 else len(drawn), is_thin=mode == "train")
            alike = sum(other["line"].items() >= one["line"].items() for other in drawn)
            one["line"]["dash"] = DASHES[alike % len(DASHES)]
            drawn.append(one | ({"showlegend": True} if len(runs) > 1 else {}))
    memory = [value for one in groups.get("memory", ()) for value in one["y"]]
    if memory and max(memory) <= _NEARLY_CONSTANT * min(memory):
        del groups["memory"]
    order = [*_TITLES]
    for name in sorted(groups, key=lambda name: (order.index(name if name in order else ""), name)):
        yield _TITLES.get(name, name), groups[name]


def trace(curve: Curve, name: str, *, color: int | str, is_thin: bool = False) -> dict[str, Any]:
    """Return a line. A curve of one point is a marker.

    Args:
        color: of CSS, or a number.
    """
    color = _COLORS[color % len(_COLORS)] if isinstance(color, int) else color
    return {
        "x": curve.iterations,
        "y": curve.values,
        "name": name,
        "mode": "lines" if len(curve.values) > 1 else "markers",
        "marker": {"size": 9, "symbol": "star", "color": color},
        "line": {"width": 1.4 if is_thin else 2.4, "color": color},
    }
