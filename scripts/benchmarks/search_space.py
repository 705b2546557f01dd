"""The tasks of `search_tables.py`: their spaces, the configurations that are drawn, and their recorded curves."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

EPOCHS = 27


class Log(NamedTuple):
    """A dimension with a logarithmic scale."""

    low: float
    high: float


Space = dict[str, Log | list[Any]]
"""Dimensions by key: a scale, or a few values."""

SPACES: dict[str, Space] = {
    "digits": {
        "optimizer.lr": Log(1e-4, 1e-1),
        "optimizer.weight_decay": Log(1e-4, 1.0),
        "task.model.width": [2, 4, 8],
        "task.model.dropout": [0.0, 0.2, 0.4],
        "data.loader.batch_size": [32, 64, 128],
    },
    "char_lm": {
        "optimizer.lr": Log(1e-4, 1e-1),
        "optimizer.weight_decay": Log(1e-3, 1.0),
        "task.model.width": [8, 16, 32],
        "scheduler.linear.end": [10, 30, 90],
        "data.loader.batch_size": [16, 32],
    },
    "mlp": {
        "optimizer.lr": Log(1e-4, 1e-1),
        "optimizer.weight_decay": Log(1e-4, 1.0),
        "task.model.hidden": [[16], [64], [16, 16], [64, 64]],
        "task.model.dropout": [0.0, 0.2, 0.4],
        "data.loader.batch_size": [32, 64, 128],
    },
}


class Config(NamedTuple):
    """A configuration of a task."""

    parameters: dict[str, Any]
    position: list[float]
    """In the normalised space: 0..1 in each dimension. Values of a list have equal distances, in their order."""


def draw(task: str, count: int) -> list[Config]:
    """Return configurations of a task: the same first ones for each count."""
    drawn = []
    for units in np.random.default_rng(0).random((count, len(SPACES[task]))).tolist():
        config = Config({}, [])
        for (key, values), unit in zip(SPACES[task].items(), units, strict=True):
            if isinstance(values, Log):
                config.parameters[key] = float(f"{values.low * (values.high / values.low) ** unit:.4g}")
                config.position.append(unit)
            else:
                index = int(unit * len(values))
                config.parameters[key] = values[index]
                config.position.append(index / (len(values) - 1))
        drawn.append(config)
    return drawn


def table_file(task: str) -> Path:
    """Return the file with the recorded curves of a task: gzipped, a line of JSON for each configuration."""
    return Path(__file__).parent / "tables" / f"{task}.json.gz"


def entries(task: str) -> list[dict[str, Any]]:
    """Return the recorded curves of a task, by the number of the configuration."""
    packed = table_file(task).read_bytes() if table_file(task).exists() else b""
    return sorted(map(json.loads, gzip.decompress(packed).splitlines()), key=lambda entry: int(entry["number"]))


class Table:
    """The recorded curves of a task, by configuration.

    Args:
        task: its name.
        best: the value of a trial is its best loss until now, not its last one.
    """

    def __init__(self, task: str, *, best: bool) -> None:
        found = entries(task)
        drawn = draw(task, found[-1]["number"] + 1)
        self.space = SPACES[task]
        self.positions = np.array([drawn[entry["number"]].position for entry in found])
        losses: npt.NDArray[np.float64] = np.array([entry["losses"] for entry in found], dtype=np.float64)
        self.losses = np.minimum.accumulate(losses, 1) if best else losses
        """Validation losses `[configurations, EPOCHS]`; NaN after a run has diverged."""
        self.iterations: list[int] = [entry["iterations"] for entry in found]
        """Length of an epoch."""
