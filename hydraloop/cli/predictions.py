"""Files of predictions: `.jsonl` with one line for each sample, and `.npz` with one array for each output."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hydraloop.errors import UserError
from hydraloop.run import atomic
from hydraloop.run.config_yaml import plain

FORMATS = (".jsonl", ".npz")
OUTPUT = "output"
"""The name of predictions that have none: a tensor or a list instead of a dict."""
_KEY = "output"
"""The argument of the command that names the file."""

Parts = Iterator[tuple[str, Any]]
"""The name of the data set (empty for a single one), and what `engine.predict` yields."""


def check_suffix(path: Path) -> None:
    """Refuse a file of another format."""
    if path.suffix not in FORMATS:
        raise UserError(
            f"{path} is neither JSON lines nor NumPy's format", key=_KEY, remedy=f"Use {path.stem}.jsonl or .npz."
        )


def check_output(path: Path) -> None:
    """Refuse a file in a folder that does not exist, a folder, and a file that exists."""
    if not path.parent.is_dir():
        raise UserError(f"there is no folder {path.parent}", key=_KEY, remedy="Create it, or name another file.")
    if path.is_dir():
        raise UserError(f"{path} is a folder", key=_KEY, remedy="Name a file in it, or another one.")
    if path.exists():
        free = next(other for n in count(2) if not (other := path.with_stem(f"{path.stem}_{n}")).exists())
        raise UserError(f"{path} exists", key=_KEY, remedy=f"Name another file: output={shlex.quote(str(free))}")


def write(path: Path, parts: Parts) -> None:
    """Write all predictions to a file, whose suffix says the format. It appears when it is complete.

    Raises:
        UserError: an array cannot have these predictions.
    """
    with atomic.replacing(path) as unfinished:
        if path.suffix == ".npz":
            try:
                arrays = _arrays(parts)
            except ValueError as error:  # samples of different shapes
                remedy = "Use JSON lines: output=predictions.jsonl"
                raise UserError(f"the predictions are not an array: {error}", key=_KEY, remedy=remedy) from error
            with unfinished.open("wb") as binary:
                np.savez(binary, **arrays)
            return
        with unfinished.open("w", encoding="utf-8") as text:
            for row in _rows(parts):
                text.write(json.dumps(plain(row)) + "\n")


def _columns(part: Any) -> Mapping[str, Any]:
    return part if isinstance(part, Mapping) else {OUTPUT: part}


def _rows(parts: Parts) -> Iterator[dict[str, Any]]:
    """Yield a line for each sample: the data set if there are several, the position in it, and the outputs."""
    counts: dict[str, int] = {}
    for data_set, part in parts:
        columns = {
            name: value.tolist() if isinstance(value, Tensor) else value for name, value in _columns(part).items()
        }
        if taken := columns.keys() & {"index", "data_set" if data_set else "index"}:
            remedy = "Give it another name in the task, or use output=predictions.npz."
            raise UserError(f"predict returns an entry {taken.pop()!r}, as each line has", key="task", remedy=remedy)
        for sample in zip(*columns.values(), strict=True):
            counts[data_set] = index = counts.get(data_set, -1) + 1
            where = {"data_set": data_set} if data_set else {}
            yield {**where, "index": index, **dict(zip(columns, sample, strict=True))}


def _arrays(parts: Parts) -> dict[str, Any]:
    """Return the arrays by name; with several data sets `<data set>/<output>`."""
    found: dict[str, list[Any]] = {}
    for data_set, part in parts:
        for name, value in _columns(part).items():
            found.setdefault(f"{data_set}/{name}".lstrip("/"), []).append(_array(value))
    return {name: np.concatenate(arrays) for name, arrays in found.items()}


def _array(value: Any) -> Any:
    if isinstance(value, Tensor):
        return (value.float() if value.dtype is torch.bfloat16 else value).numpy()  # NumPy has no bfloat16
    array = np.array(value)
    if array.dtype == object:
        raise ValueError(f"there are values of type {type(value[0]).__name__}")
    return array
