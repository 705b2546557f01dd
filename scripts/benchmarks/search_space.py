"""The tasks of `search_tables.py`: their spaces, the configurations that are drawn, and their recorded curves."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

EPOCHS = 27
FOLDER = Path(__file__).parent / "tables"


@dataclass(frozen=True)
class Log:
    """A dimension with a logarithmic scale."""

    low: float
    high: float

    def at(self, unit: float) -> float:
        """Return the value at a position, 0..1, with four digits."""
        return float(f"{self.low * (self.high / self.low) ** unit:.4g}")

    def position(self, value: Any) -> float:
        """Return the position of a value, 0..1."""
        return math.log(value / self.low) / math.log(self.high / self.low)


@dataclass(frozen=True)
class Choice:
    """A dimension with a few values, in their order."""

    values: tuple[Any, ...]

    def at(self, unit: float) -> Any:
        """Return the value at a position, 0..1."""
        return self.values[min(int(unit * len(self.values)), len(self.values) - 1)]

    def position(self, value: Any) -> float:
        """Return the position of a value, 0..1."""
        return self.values.index(value) / (len(self.values) - 1)


Space = dict[str, Log | Choice]
SPACES: dict[str, Space] = {
    "digits": {
        "optimizer.lr": Log(1e-4, 1e-1),
        "optimizer.weight_decay": Log(1e-4, 1.0),
        "task.model.width": Choice((2, 4, 6)),
        "task.model.dropout": Choice((0.0, 0.2, 0.4)),
        "data.loader.batch_size": Choice((64, 128, 256)),
    },
    "char_lm": {
        "optimizer.lr": Log(1e-4, 1e-1),
        "optimizer.weight_decay": Log(1e-3, 1.0),
        "task.model.width": Choice((8, 16, 32)),
        "task.model.layers": Choice((1, 2)),
        "task.model.dropout": Choice((0.0, 0.1, 0.2)),
        "data.loader.batch_size": Choice((32, 64)),
    },
    "mlp": {
        "optimizer.lr": Log(1e-4, 1e-1),
        "optimizer.weight_decay": Log(1e-4, 1.0),
        "task.model.hidden": Choice(([16], [64], [16, 16], [64, 64])),
        "task.model.dropout": Choice((0.0, 0.2, 0.4)),
        "data.loader.batch_size": Choice((32, 64, 128)),
    },
}


def draw(task: str, count: int) -> list[dict[str, Any]]:
    """Return the configurations of a task: the same first ones for each count."""
    units = np.random.default_rng(0).random((count, len(SPACES[task])))
    return [
        {key: space.at(unit) for (key, space), unit in zip(SPACES[task].items(), row, strict=True)} for row in units
    ]


class Table:
    """The recorded curves of a task, by configuration.

    Args:
        task: its name.
    """

    def __init__(self, task: str) -> None:
        lines = gzip.decompress((FOLDER / f"{task}.json.gz").read_bytes()).decode().splitlines()
        entries = [json.loads(line) for line in lines]
        self.space = SPACES[task]
        self.parameters: list[dict[str, Any]] = [entry["parameters"] for entry in entries]
        self.losses: npt.NDArray[np.float64] = np.array([entry["losses"] for entry in entries], dtype=np.float64)
        """Validation losses `[configurations, EPOCHS]`; NaN after a run has diverged."""
        self.iterations: list[int] = [entry["iterations"] for entry in entries]
        """Length of an epoch."""

    @cached_property
    def positions(self) -> npt.NDArray[np.float64]:
        """Return the configurations in the normalised space, `[configurations, dimensions]`, 0..1."""
        return np.array([self.position(parameters) for parameters in self.parameters])

    def position(self, parameters: dict[str, Any]) -> list[float]:
        """Return values of all dimensions as 0..1."""
        return [dimension.position(parameters[key]) for key, dimension in self.space.items()]
